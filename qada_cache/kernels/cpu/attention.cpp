// The CPU's kernels, each with the contract of its reference in Python, which it is tested against: `partial_attention`
// (reference.py) and `fused_decode` (decode_reference.py). `compiled.py` builds this file once for every shape it meets.

#include "partial.h"

namespace {

enum Criterion { LOCAL, DENSE, STATIC, GAUSSIAN };
enum GroupRule { HEAD, ANY };

// The arguments of `fused_decode`; `Decode` in compiled_decode.py has the same fields. Shapes are those of
// decode_reference.py; `*_row`, `*_batch` and `*_head` say how many elements apart rows and heads are, 0 if shared.
struct Decode {
    const Element *query, *near_keys, *near_values, *bulk_keys, *bulk_values;
    const uint8_t *local, *staged, *decided, *table;
    const int64_t *bulk_lengths, *count;  // `count` may be null, and so may what a criterion does not use
    const float *mean, *covariance, *other_mean, *other_covariance;
    float* out;
    uint8_t* flags;
    int64_t* pulled;
    int64_t batch, kv_heads, columns, split_tokens;
    int64_t near_key_batch, near_key_head, near_value_batch, near_value_head;
    int64_t bulk_key_batch, bulk_key_head, bulk_value_batch, bulk_value_head;
    int64_t local_row, staged_row, decided_row, length_row, count_row;
    int64_t mean_row, covariance_row, other_mean_row, other_covariance_row;
    float scaling, limit;  // `log A_local - log A_bulk` below which a head is long-context
    int criterion, group_rule, pool_staged, threads;

    const Element* near_key(int64_t row, int64_t head) const {
        return near_keys + row * near_key_batch + head * near_key_head;
    }
    const Element* near_value(int64_t row, int64_t head) const {
        return near_values + row * near_value_batch + head * near_value_head;
    }
    int64_t stored(int64_t row) const { return bulk_lengths[row * length_row]; }

    // Adds the near columns where `mask` is set, run by run.
    void add_near(Partial& partial, const uint8_t* mask, int64_t row, int64_t head) const {
        for (int64_t start = 0, stop; start < columns; start = stop + 1) {
            for (stop = start; stop < columns && mask[stop];) stop++;
            partial.add(near_key(row, head) + start * DIM, near_value(row, head) + start * VALUE_DIM, stop - start);
        }
    }
};

// Pools the moments of `count` scores with those of the staged keys, of which there are `tokens`; see
// `criterion.pool_score_moments`.
void pool(const Decode& call, const Partial& local, int64_t row, int64_t head, float count, float tokens, float* mean,
          float* variance) {
    const uint8_t* staged = call.staged + row * call.staged_row;
    std::vector<float> scores;
    scores.reserve(call.columns * QUERIES);
    for (int64_t column = 0; column < call.columns; column++)
        if (staged[column]) {
            scores.resize(scores.size() + QUERIES);
            local.score(call.near_key(row, head) + column * DIM, &scores[scores.size() - QUERIES], 1);
        }
    float total = std::max(count + tokens, 1.0f);
    for (int q = 0; q < QUERIES; q++) {
        float sum = 0, squares = 0;
        for (size_t i = q; i < scores.size(); i += QUERIES) sum += scores[i];
        float staged_mean = sum / std::max(tokens, 1.0f);
        for (size_t i = q; i < scores.size(); i += QUERIES)
            squares += (scores[i] - staged_mean) * (scores[i] - staged_mean);
        float staged_variance = squares / std::max(tokens, 1.0f), delta = staged_mean - mean[q];
        mean[q] += delta * (tokens / total);
        variance[q] = (count * variance[q] + tokens * staged_variance + delta * delta * (count * tokens / total)) / total;
    }
}

// Mean and variance of every query's scores of keys with these moments; see `criterion.score_moments`.
void score_moments(const Partial& local, const float* key_mean, const float* covariance, float* mean, float* variance) {
    float query[QUERIES][DIM];
    for (int q = 0; q < QUERIES; q++) {  // already scaled
        mean[q] = variance[q] = 0;
        const float* lanes = (const float*)local.scaled[q];
        for (int d = 0; d < DIM; d++) query[q][d] = lanes[place<DIM>(d)];
    }
    for (int i = 0; i < DIM; i++)
        for (int q = 0; q < QUERIES; q++) {
            float product = 0;
#pragma omp simd reduction(+ : product)
            for (int j = 0; j < DIM; j++) product += covariance[i * DIM + j] * query[q][j];
            mean[q] += key_mean[i] * query[q][i];
            variance[q] += product * query[q][i];
        }
    for (int q = 0; q < QUERIES; q++) variance[q] = std::max(variance[q], 0.0f);
}

// Eq. 7's `log A_bulk` of every query of a head, of two prompts' moments the larger; +inf without any moments: then
// nothing can be said about the bulk.
void gaussian(const Decode& call, const Partial& local, int64_t row, int64_t head, float tokens, float* log_bulk) {
    float mean[QUERIES], variance[QUERIES];
    std::fill(log_bulk, log_bulk + QUERIES, call.other_mean ? -INFINITY : INFINITY);
    if (call.mean) {
        score_moments(local, call.mean + row * call.mean_row + head * DIM,
                      call.covariance + row * call.covariance_row + head * DIM * DIM, mean, variance);
        float known = (float)call.count[row * call.count_row];
        if (call.pool_staged) {
            float staged = tokens - (float)call.stored(row);
            pool(call, local, row, head, known, staged, mean, variance);
            known += staged;
        }
        for (int q = 0; q < QUERIES && known > 0; q++) log_bulk[q] = logf(tokens) + mean[q] + 0.5f * variance[q];
    }
    if (call.other_mean) {
        score_moments(local, call.other_mean + row * call.other_mean_row + head * DIM,
                      call.other_covariance + row * call.other_covariance_row + head * DIM * DIM, mean, variance);
        for (int q = 0; q < QUERIES; q++)
            log_bulk[q] = std::max(log_bulk[q], logf(tokens) + mean[q] + 0.5f * variance[q]);
    }
}

// Local attention of one KV head, and which of its queries need the long context: whether any does.
bool decide(const Decode& call, int64_t row, int64_t head, float* out, float* lse) {
    const uint8_t* staged = call.staged + row * call.staged_row;
    int64_t index = row * call.kv_heads + head;
    uint8_t* flags = call.flags + index * QUERIES;
    Partial local(call.query + index * QUERIES * DIM, call.scaling);
    call.add_near(local, call.local + row * call.local_row, row, head);
    local.finish(out, lse);

    int64_t tokens = call.stored(row) + std::count(staged, staged + call.columns, 1);
    float log_bulk[QUERIES] = {};
    bool decided = call.decided[row * call.decided_row] && tokens > 0;
    if (decided && call.criterion == GAUSSIAN) gaussian(call, local, row, head, (float)tokens, log_bulk);
    bool any = false;
    for (int q = 0; q < QUERIES; q++) {
        bool flag = call.criterion == DENSE || (call.criterion == STATIC && call.table[head * QUERIES + q]);
        if (call.criterion == GAUSSIAN) flag = lse[q] - log_bulk[q] < call.limit;
        flags[q] = flag && decided;
        any = any || flags[q];
    }
    if (call.group_rule == ANY) std::fill(flags, flags + QUERIES, any);
    return any;
}

}  // namespace

// `query` [batch, heads, QUERIES, DIM] contiguous; `key` and `value` [batch, heads, tokens, *], whose rows of a head
// are contiguous and whose batches and heads are so many elements apart; `out` [batch, heads, QUERIES, VALUE_DIM] and
// `lse` [batch, heads, QUERIES].
extern "C" void partial_attention(const Element* query, const Element* key, const Element* value, float* out,
                                  float* lse, int64_t batch, int64_t heads, int64_t tokens, int64_t key_batch,
                                  int64_t key_head, int64_t value_batch, int64_t value_head, int64_t split_tokens,
                                  int threads, float scaling) {
    int64_t splits = splits_of(tokens, batch * heads, threads, split_tokens);
    std::vector<float> parts(batch * heads * splits * SIZE), part_lse(batch * heads * splits * QUERIES);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t job = 0; job < batch * heads * splits; job++) {
        int64_t head = job / splits, split = job % splits;
        int64_t start = tokens * split / splits, stop = tokens * (split + 1) / splits;
        Partial partial(query + head * QUERIES * DIM, scaling);
        partial.add(key + head / heads * key_batch + head % heads * key_head + start * DIM,
                    value + head / heads * value_batch + head % heads * value_head + start * VALUE_DIM, stop - start);
        partial.finish(&parts[job * SIZE], &part_lse[job * QUERIES]);
    }
    for (int64_t head = 0; head < batch * heads; head++)
        for (int q = 0; q < QUERIES; q++)
            merge(&parts[head * splits * SIZE], &part_lse[head * splits * QUERIES], splits, q,
                  out + (head * QUERIES + q) * VALUE_DIM, lse + head * QUERIES + q);
}

// One decode step of one layer. Heads are decided about first; then the bulks of those that need it are read, which is
// where the time goes, by all threads alike.
extern "C" void fused_decode(const Decode* given) {
    const Decode& call = *given;
    int64_t kv_heads = call.batch * call.kv_heads;
    struct Job {
        int64_t head, start, stop, part;
    };
    std::vector<Job> jobs;
    std::vector<float> near_out(kv_heads * SIZE), near_lse(kv_heads * QUERIES), parts, part_lse;
    std::vector<int64_t> first_part(kv_heads + 1);  // of each head: local attention, then its jobs'; none if local
    std::vector<uint8_t> needed(kv_heads);
#pragma omp parallel num_threads(call.threads)
    {
#pragma omp for schedule(dynamic)
        for (int64_t head = 0; head < kv_heads; head++)
            needed[head] = decide(call, head / call.kv_heads, head % call.kv_heads, &near_out[head * SIZE],
                                  &near_lse[head * QUERIES]);
#pragma omp single
        {
            int64_t flagged = std::count(needed.begin(), needed.end(), 1), part = 0;
            for (int64_t head = 0; head < kv_heads; head++) {
                first_part[head] = part;
                if (!needed[head]) continue;
                int64_t tokens = call.stored(head / call.kv_heads);
                int64_t splits = splits_of(tokens, flagged, call.threads, call.split_tokens);
                parts.insert(parts.end(), &near_out[head * SIZE], &near_out[head * SIZE] + SIZE);
                part_lse.insert(part_lse.end(), &near_lse[head * QUERIES], &near_lse[head * QUERIES] + QUERIES);
                for (int64_t split = 0; split < splits; split++)
                    jobs.push_back({head, tokens * split / splits, tokens * (split + 1) / splits, part + 1 + split});
                part += 1 + splits;
                parts.resize(part * SIZE);
                part_lse.resize(part * QUERIES);
                *call.pulled += tokens * (DIM + VALUE_DIM) * (int64_t)sizeof(Element);
            }
            first_part[kv_heads] = part;
        }
#pragma omp for schedule(dynamic)
        for (size_t index = 0; index < jobs.size(); index++) {
            const Job& job = jobs[index];
            int64_t row = job.head / call.kv_heads, head = job.head % call.kv_heads;
            Partial far(call.query + job.head * QUERIES * DIM, call.scaling);
            if (job.start == 0) call.add_near(far, call.staged + row * call.staged_row, row, head);
            far.add(call.bulk_keys + row * call.bulk_key_batch + head * call.bulk_key_head + job.start * DIM,
                    call.bulk_values + row * call.bulk_value_batch + head * call.bulk_value_head +
                        job.start * VALUE_DIM,
                    job.stop - job.start);
            far.finish(&parts[job.part * SIZE], &part_lse[job.part * QUERIES]);
        }
    }
    for (int64_t head = 0; head < kv_heads; head++)
        for (int q = 0; q < QUERIES; q++) {
            float* out = call.out + head * SIZE + q * VALUE_DIM;
            const float* local = &near_out[head * SIZE + q * VALUE_DIM];
            int64_t part = first_part[head];
            float lse;
            if (call.flags[head * QUERIES + q])
                merge(&parts[part * SIZE], &part_lse[part * QUERIES], first_part[head + 1] - part, q, out, &lse);
            else
                std::copy(local, local + VALUE_DIM, out);
        }
}
