// Merges tokens into means and covariances: `take_in_by_torch` of kernels/correlating.py, for DIM channels on the left
// and VALUE_DIM on the right. Sums do not depend on the number of threads.

#include <cstring>
#include <memory>

#include "products.h"

namespace {

// The arguments, `Correlating` of correlating.py.
struct Correlating {
    const Number *left, *right;  // [rows, heads, tokens, DIM or VALUE_DIM]
    float *left_mean, *right_mean;  // [rows, heads, DIM or VALUE_DIM], of `count` tokens; the same if left is right
    float* covariance;  // [rows, heads, DIM, VALUE_DIM]
    int64_t left_strides[3], right_strides[3];  // in numbers
    int64_t rows, heads, tokens, count, threads;

    const Number* left_of(int64_t head) const { return at(left, left_strides, head); }
    const Number* right_of(int64_t head) const { return at(right, right_strides, head); }

private:
    const Number* at(const Number* first, const int64_t* strides, int64_t head) const {
        return first + head / heads * strides[0] + head % heads * strides[1];
    }
};

constexpr int BLOCK = 64;  // tokens
constexpr int PART = 4 * ROWS;  // channels of the left, that one thread multiplies
constexpr int PARTS = (DIM + PART - 1) / PART;

// The mean of a head's tokens, from sums of blocks: long sums lose more to rounding.
template <int SIZE>
void average(const Number* tokens, int64_t stride, int64_t count, float* mean) {
    float sums[SIZE] = {};
    for (int64_t start = 0; start < count; start += BLOCK) {
        float own[SIZE] = {};
        for (int64_t t = start; t < std::min(count, start + BLOCK); t++)
            for (int d = 0; d < SIZE; d++) own[d] += widen(tokens[t * stride + d]);
        for (int d = 0; d < SIZE; d++) sums[d] += own[d];
    }
    for (int d = 0; d < SIZE; d++) mean[d] = sums[d] / count;
}

// The shares of old and of new tokens in their union, which add up to 1.
struct Shares {
    explicit Shares(const Correlating& call)
        : old(double(call.count) / (call.count + call.tokens)), own(double(call.tokens) / (call.count + call.tokens)) {}
    float old, own;
};

// Merges the new tokens, whose means are given, into up to PART rows of a head's covariance, from channel `first` on.
void correlate(const Correlating& call, int64_t head, int first, const float* left_mean, const float* right_mean) {
    const int count = std::min(PART, DIM - first);
    const Number *left = call.left_of(head) + first, *right = call.right_of(head);
    alignas(64) float sums[PART][VALUE_DIM] = {};
    for (int64_t start = 0; start < call.tokens; start += BLOCK) {
        const int64_t tokens = std::min<int64_t>(BLOCK, call.tokens - start);
        alignas(64) float own[BLOCK][PART], others[BLOCK][VALUE_DIM];
        if (count < PART || tokens < BLOCK) std::memset(own, 0, sizeof own), std::memset(others, 0, sizeof others);
        for (int64_t t = 0; t < tokens; t++) {
            const Number* one = left + (start + t) * call.left_strides[2];
            const Number* other = right + (start + t) * call.right_strides[2];
            for (int d = 0; d < count; d++) own[t][d] = widen(one[d]) - left_mean[first + d];
            for (int d = 0; d < VALUE_DIM; d++) others[t][d] = widen(other[d]) - right_mean[d];
        }
        add_products<BLOCK>(own, PART, others, sums);
    }
    const Shares share(call);
    float* covariance = call.covariance + (head * DIM + first) * VALUE_DIM;
    for (int d = 0; d < count; d++, covariance += VALUE_DIM)
        for (int c = 0; c < VALUE_DIM; c++) {
            const float own = sums[d][c] / (call.count + call.tokens);
            if (!call.count) covariance[c] = own;
            else {
                const float off = left_mean[first + d] - call.left_mean[head * DIM + first + d];
                const float other = right_mean[c] - call.right_mean[head * VALUE_DIM + c];
                covariance[c] = covariance[c] * share.old + own + off * other * (share.old * share.own);
            }
        }
}

void merge(float* mean, const float* own, int64_t size, const Correlating& call) {
    const Shares share(call);
    for (int64_t d = 0; d < size; d++) mean[d] = call.count ? mean[d] + (own[d] - mean[d]) * share.own : own[d];
}

void take_in(const Correlating& call) {
    const int64_t heads = call.rows * call.heads;
    const bool alike = call.left_mean == call.right_mean;
    std::unique_ptr<float[]> left(new float[heads * DIM]), right(new float[heads * VALUE_DIM]);
#pragma omp parallel num_threads(call.threads)
    {
#pragma omp for schedule(dynamic)
        for (int64_t job = 0; job < heads * 2; job++) {
            const int64_t head = job / 2;
            if (job % 2)
                average<VALUE_DIM>(call.right_of(head), call.right_strides[2], call.tokens, &right[head * VALUE_DIM]);
            else if (!alike) average<DIM>(call.left_of(head), call.left_strides[2], call.tokens, &left[head * DIM]);
        }
        const float* means = (alike ? right : left).get();
#pragma omp for schedule(dynamic)
        for (int64_t job = 0; job < heads * PARTS; job++) {
            const int64_t head = job / PARTS;
            correlate(call, head, job % PARTS * PART, means + head * DIM, &right[head * VALUE_DIM]);
        }
    }
    if (!alike) merge(call.left_mean, left.get(), heads * DIM, call);
    merge(call.right_mean, right.get(), heads * VALUE_DIM, call);
}

}  // namespace

extern "C" int64_t call_size() { return sizeof(Correlating); }

extern "C" int take_in(const Correlating* call) try {
    take_in(*call);
    return 0;
} catch (...) {
    return 1;
}
