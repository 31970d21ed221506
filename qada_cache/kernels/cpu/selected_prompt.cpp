// Selected attention of a prompt's queries, one KV head at a time: what `selected_prompt.py` says, which builds this
// file, in the macros of prompt.h and its own.
//
// A block of queries of one head meets its near keys, then the codes of the far ones from the newest on. Codes are
// bytes, so that one product has four dimensions of 16 keys. A query's scores are powers of two, less the one of all
// near keys together (`Block::base`), so that sums neither vanish nor overflow.

#include <array>
#include <vector>

#include "prompt.h"

#if !defined(__AVX512VNNI__)
#error "the processor multiplies no bytes (AVX512-VNNI)"
#endif

namespace {

// `selected_prompt.py` defines SEGMENT, BLOCK, LEVELS and ROTATED, the channels that are rotated together.
static_assert(SEGMENT == CHUNK && BLOCK % STRIP == 0 && LEVELS < 128);
constexpr int STRIPS = BLOCK / STRIP;
constexpr int QUADS = DIM / 4;         // four bytes of a code
constexpr int ZERO = LEVELS + 1;       // of a query's bytes
constexpr float FLAT = 1e-6;             // a variance of scores below is rounding, and values follow nothing
constexpr float MOST = 100;            // a key of a score beyond is always read

// What Python passes, in its order. Tokens are of the prompt, queries those from `start` on.
struct Call {
    const Number *query, *key, *value;    // [group, queries, DIM], [tokens, DIM], [tokens, VALUE_DIM]
    void* out;                            // [group, queries, VALUE_DIM], bfloat16 or float32
    const Number* centres;                // [segments, DIM], of keys from `first` on
    const uint32_t* codes;                // [segments, QUADS, SEGMENT], signed bytes
    const int32_t* corrections;           // [segments, SEGMENT]: -ZERO times a code's sum
    const float* steps;                   // [segments, SEGMENT]: of codes
    const float* means;                   // [blocks, DIM + VALUE_DIM], of far keys and their values
    const float* covariances;             // [blocks, DIM, DIM + VALUE_DIM], of far keys with these
    int64_t* read;                        // to which the pairs of a query and a far key that were read are added
    int64_t query_head, query_token, key_token, value_token, out_head, out_token;  // strides, in numbers
    int64_t group, queries, tokens, start, first, window;
    int64_t narrow;  // whether `out` is bfloat16
    int64_t threads;
    double scaling, threshold;
};

// Far keys of a block: whole segments between sinks and the window of its first query.
inline int64_t far_stop(const Call& call, int64_t query) {
    return (call.start + query - call.window + 1) / SEGMENT * SEGMENT;
}

struct Block {
    Strip strips[STRIPS];
    uint32_t query[BLOCK][WORDS], query_codes[BLOCK][QUADS];  // bytes
    alignas(64) float query_steps[BLOCK], base[BLOCK], cut[BLOCK];
    alignas(64) float centred[BLOCK][CHUNK];  // scores of the centres of some segments, less `base`
    alignas(64) float scores[BLOCK][SEGMENT];
    __m512 met[BLOCK], unread[BLOCK], lifted[BLOCK];  // sums of weights, of those unread, and of these by their scores
    alignas(64) float slopes[BLOCK][VALUE_DIM], mean_scores[BLOCK];  // of lines of regression, in powers of two
    uint32_t keys[TILE * WORDS], values[TILE / IN_WORD * VALUE_DIM];
    std::vector<int64_t> chosen;
};

inline float widen(Number number) {
    if constexpr (IN_WORD == 1) return number;
    else return loaded<float>(std::array<uint16_t, 2>{0, uint16_t(number)}.data());
}

// What keys' codes are of: Hadamard blocks.
void rotate(float* state) {
    for (int half = 1; half < ROTATED; half *= 2)
        for (int first = 0; first < DIM; first += 2 * half)
            for (int each = first; each < first + half; each++) {
                const float one = state[each], other = state[each + half];
                state[each] = one + other, state[each + half] = one - other;
            }
    for (int d = 0; d < DIM; d++) state[d] *= 1 / std::sqrt(float(ROTATED));
}

// A query's code, from its state, which is rotated.
void encode(Block& block, int q, float* state, float scaling) {
    rotate(state);
    float most = std::numeric_limits<float>::min();
    for (int d = 0; d < DIM; d++) most = std::max(most, std::abs(state[d]));
    uint8_t* code = (uint8_t*)block.query_codes[q];
    for (int d = 0; d < DIM; d++) code[d] = ZERO + (int)std::nearbyint(state[d] * (LEVELS / most));
    block.query_steps[q] = most / LEVELS * scaling;
}

// A query's line of regression, of values on scores: covariance over variance.
void regress(Block& block, int q, const float* state, const float* mean, const float* covariances, float scaling) {
    constexpr int WIDTH = DIM + VALUE_DIM;
    alignas(64) float along[WIDTH] = {};
    for (int i = 0; i < DIM; i++)
        for (int d = 0; d < WIDTH; d++) along[d] += state[i] * covariances[i * WIDTH + d];
    float variance = 0, score = 0;
    for (int d = 0; d < DIM; d++) variance += along[d] * state[d], score += mean[d] * state[d];
    const float slope = scaling * scaling * variance > FLAT ? 1 / (scaling * variance) : 0;
    for (int d = 0; d < VALUE_DIM; d++) block.slopes[q][d] = along[DIM + d] * slope;
    block.mean_scores[q] = scaling * score;
}

// `sum`, integers, and products of unsigned and signed bytes. By GCC's function, and in arrays of vectors of integers,
// sums are moved to memory and back.
INLINED __m512 added_bytes(__m512 sum, __m512i bytes, __m512i signed_bytes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(signed_bytes));
    return sum;
}

// 2 to the power of `x`, 0 beyond 128: the number that has `x` in its bits, as exponent and fraction. It is off by 4%
// at most and, thanks to `LESS`, right in the mean: what is estimated are sums over many keys.
INLINED __m512 about_power_of_two(__m512 x) {
    constexpr float ONE = 1 << 23, LESS = 0.0562f;  // LESS: log2(3 / 2 * ln 2)
    const __m512 bits = _mm512_fmadd_ps(x, _mm512_set1_ps(ONE), _mm512_set1_ps((127 - LESS) * ONE));
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_cvtps_epi32(bits), _mm512_setzero_si512()));
}

// Estimated scores of a strip and the keys of a segment, to `scores`; which keys reach the cut, to `asked`.
INLINED void estimate(Block& block, int strip, const Call& call, int64_t segment, __mmask16* asked) {
    const uint32_t* codes = call.codes + segment * QUADS * SEGMENT;
    __m512 sums[STRIP][4];
    UNROLLED for (int c = 0; c < 4; c++) {
        const __m512 correction = _mm512_loadu_ps(call.corrections + segment * SEGMENT + c * LANES);
        UNROLLED for (int q = 0; q < STRIP; q++) sums[q][c] = correction;
    }
    for (int quad = 0; quad < QUADS; quad++) {
        __m512i column[4];
        UNROLLED for (int c = 0; c < 4; c++) column[c] = _mm512_loadu_si512(codes + quad * SEGMENT + c * LANES);
        UNROLLED for (int q = 0; q < STRIP; q++) {
            const __m512i row = _mm512_set1_epi32(block.query_codes[strip * STRIP + q][quad]);
            UNROLLED for (int c = 0; c < 4; c++) sums[q][c] = added_bytes(sums[q][c], row, column[c]);
        }
    }
    UNROLLED for (int c = 0; c < 4; c++) {
        const __m512 step = _mm512_loadu_ps(call.steps + segment * SEGMENT + c * LANES);
        UNROLLED for (int q = 0; q < STRIP; q++) {
            const int query = strip * STRIP + q;
            const __m512 product = _mm512_cvtepi32_ps((__m512i)sums[q][c]);
            const __m512 score = _mm512_fmadd_ps(_mm512_mul_ps(product, step), _mm512_set1_ps(block.query_steps[query]),
                                                 _mm512_set1_ps(block.centred[query][segment % CHUNK]));
            asked[c] |= _mm512_cmp_ps_mask(score, _mm512_set1_ps(block.cut[query]), _CMP_GE_OQ);
            _mm512_store_ps(block.scores[query] + c * LANES, score);
        }
    }
}

// Scores of the 64 centres from `segment` on, to `centred`.
void score_centres(Block& block, const Call& call, int64_t segment, int64_t segments) {
    const auto token = [&](int64_t each) { return segment + each; };
    pack_keys(call.centres, DIM, segments - segment, token, block.keys);
    for (int strip = 0; strip < STRIPS; strip++) {
        alignas(64) float scores[STRIP][TILE];
        score(block.query + strip * STRIP, block.keys, scores);
        for (int q = 0; q < STRIP; q++)
            for (int each = 0; each < CHUNK; each++)
                block.centred[strip * STRIP + q][each] =
                    scores[q][each] * float(call.scaling * LOG2_E) - block.base[strip * STRIP + q];
    }
}

// Meets the far keys of a block, up to `stop`: sums of what is estimated of those unread, and the others to `chosen`.
void scan(Block& block, const Call& call, int64_t stop) {
    const int64_t segments = (stop - call.first) / SEGMENT;
    const float share = std::log2(call.threshold / (stop - call.first));
    block.chosen.clear();
    for (int q = 0; q < BLOCK; q++)
        block.met[q] = _mm512_set1_ps(1.0f / LANES), block.unread[q] = block.lifted[q] = _mm512_setzero_ps();
    for (int64_t segment = segments - 1; segment >= 0; segment--) {
        if (segment % CHUNK == CHUNK - 1 || segment == segments - 1)
            score_centres(block, call, segment / CHUNK * CHUNK, segments);
        if ((segments - 1 - segment) % (TILE / SEGMENT) == 0)
            for (int q = 0; q < BLOCK; q++)
                block.cut[q] = std::min(MOST, std::log2(_mm512_reduce_add_ps(block.met[q])) + share);
        __mmask16 asked[4] = {};
        for (int strip = 0; strip < STRIPS; strip++) estimate(block, strip, call, segment, asked);
        for (int q = 0; q < BLOCK; q++) {
            __m512 met = block.met[q], unread = block.unread[q], lifted = block.lifted[q];
            UNROLLED for (int c = 0; c < 4; c++) {
                const __m512 score = _mm512_load_ps(block.scores[q] + c * LANES), weight = about_power_of_two(score);
                const __mmask16 left = ~asked[c];
                met = _mm512_add_ps(met, weight);
                unread = _mm512_mask_add_ps(unread, left, unread, weight);
                lifted = _mm512_mask3_fmadd_ps(weight, score, lifted, left);
            }
            block.met[q] = met, block.unread[q] = unread, block.lifted[q] = lifted;
        }
        for (int c = 0; c < 4; c++)
            for (uint32_t left = asked[c]; left; left &= left - 1)
                block.chosen.push_back(call.first + segment * SEGMENT + c * LANES + __builtin_ctz(left));
    }
}

// Attention of a query over what it read and the estimate of the rest.
void write(const Block& block, const Call& call, const float* values, int64_t head, int64_t query, int q) {
    const Strip& strip = block.strips[q / STRIP];
    const float unread = _mm512_reduce_add_ps(block.unread[q]);
    const float most = std::max(strip.peak[q % STRIP], block.base[q]);
    const float kept = std::exp2(strip.peak[q % STRIP] - most), rest = unread * std::exp2(block.base[q] - most);
    const float total = strip.total[q % STRIP] * kept + rest;
    const float mean = unread > 0 ? _mm512_reduce_add_ps(block.lifted[q]) / unread + block.base[q] : 0;
    const float tilt = unread > 0 ? mean - block.mean_scores[q] : 0;
    for (int d = 0; d < VALUE_DIM; d += LANES) {
        const __m512 value =
            _mm512_fmadd_ps(_mm512_set1_ps(tilt), _mm512_loadu_ps(block.slopes[q] + d), _mm512_loadu_ps(values + d));
        const __m512 sum =
            _mm512_fmadd_ps(_mm512_set1_ps(rest / total), value,
                            _mm512_mul_ps(_mm512_set1_ps(kept / total), _mm512_loadu_ps(strip.sums[q % STRIP] + d)));
        const int64_t to = head * call.out_head + query * call.out_token + d;
        if (call.narrow) store_bfloat16((uint16_t*)call.out + to, sum);
        else _mm512_storeu_ps((float*)call.out + to, sum);
    }
}

// A block of queries of a head; `keys` and `values` of all tokens, packed.
void attend(Block& block, const Call& call, int64_t head, int64_t index, const uint32_t* keys, const uint32_t* values) {
    const int64_t start = index * BLOCK, count = std::min<int64_t>(BLOCK, call.queries - start);
    const int64_t stop = far_stop(call, start), end = call.start + start + count;
    const float scaling = call.scaling * LOG2_E;
    const float* mean = call.means + index * (DIM + VALUE_DIM);
    for (int q = 0; q < BLOCK; q++) {  // the last one again, where there are fewer
        const Number* query =
            call.query + head * call.query_head + (start + std::min<int64_t>(q, count - 1)) * call.query_token;
        std::memcpy(block.query[q], query, sizeof block.query[q]);
        alignas(64) float state[DIM];
        std::transform(query, query + DIM, state, widen);
        regress(block, q, state, mean, call.covariances + index * DIM * (DIM + VALUE_DIM), scaling);
        encode(block, q, state, scaling);
    }
    const auto meet_all = [&](const uint32_t* keys, const uint32_t* values, int64_t columns, auto visible) {
        for (int strip = 0; strip < STRIPS; strip++)
            meet(
                block.strips[strip], block.query + strip * STRIP, keys, values,
                (std::min<int64_t>(columns, TILE) + CHUNK - 1) / CHUNK * CHUNK,
                [&](int q) { return visible(strip * STRIP + q); }, scaling);
    };
    for (Strip& strip : block.strips) begin(strip);
    for (int64_t tile = 0; tile < call.first; tile += TILE)
        meet_all(keys + tile * WORDS, values + tile / IN_WORD * VALUE_DIM, call.first - tile,
                 [&](int) { return call.first - tile; });
    for (int64_t tile = stop; tile < end; tile += TILE)
        meet_all(keys + tile * WORDS, values + tile / IN_WORD * VALUE_DIM, end - tile,
                 [&](int q) { return call.start + std::min(start + q, start + count - 1) + 1 - tile; });
    for (int q = 0; q < BLOCK; q++)
        block.base[q] = block.strips[q / STRIP].peak[q % STRIP] + std::log2(block.strips[q / STRIP].total[q % STRIP]);
    scan(block, call, stop);
    for (size_t tile = 0; tile < block.chosen.size(); tile += TILE) {
        const int64_t left = block.chosen.size() - tile;
        for (int64_t chunk = 0; chunk < std::min<int64_t>(left, TILE); chunk += CHUNK) {
            const auto token = [&](int64_t each) { return block.chosen[tile + chunk + each]; };
            pack_keys(call.key, call.key_token, left - chunk, token, block.keys + chunk * WORDS);
            pack_values(call.value, call.value_token, left - chunk, token, block.values + chunk / IN_WORD * VALUE_DIM);
        }
        meet_all(block.keys, block.values, left, [&](int) { return left; });
    }
    for (int64_t q = 0; q < count; q++) write(block, call, mean + DIM, head, start + q, q);
#pragma omp atomic
    *call.read += count * int64_t(block.chosen.size());
}

void attend(const Call& call) {
    const int64_t chunks = (call.tokens + CHUNK - 1) / CHUNK + TILE / CHUNK;
    const int64_t blocks = (call.queries + BLOCK - 1) / BLOCK;
    std::unique_ptr<uint32_t[]> keys(new uint32_t[chunks * CHUNK * WORDS]);
    std::unique_ptr<uint32_t[]> values(new uint32_t[chunks * CHUNK / IN_WORD * VALUE_DIM]);
    std::vector<Block> room(call.threads);
    for (Block& block : room) block.chosen.reserve(call.tokens);  // nothing may be thrown in a thread
    pack(call.key, call.key_token, call.value, call.value_token, call.tokens, chunks, call.threads, keys.get(),
         values.get());
    // The last ones first: they see most.
#pragma omp parallel for num_threads(call.threads) schedule(dynamic)
    for (int64_t each = blocks * call.group - 1; each >= 0; each--)
        attend(room[omp_get_thread_num()], call, each % call.group, each / call.group, keys.get(), values.get());
}

}  // namespace

// As in prompt.cpp.
extern "C" int64_t call_size() { return sizeof(Call); }

extern "C" int prompt_attention(const Call* call) try {
    attend(*call);
    return 0;
} catch (...) {
    return 1;
}
