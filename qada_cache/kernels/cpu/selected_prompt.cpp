// Selected attention of a prompt's queries, one KV head at a time, by the method that `selected_prompt.py` describes.
// It builds this file, with the macros of prompt.h and its own.
//
// A block of queries of one head attends to its near keys, then scans the codes of its far keys from the newest on. A
// word has codes of four channels of a key. Scores are exponents of two, and relative to the sum over all near keys
// (`Block::base`), so that sums of weights neither vanish nor overflow.

#include "far_keys.h"

namespace {

// 2 to the power of `x`: the number that has `x` in its bits, as exponent and fraction. It is off by 4% at most and,
// thanks to `LESS`, right in the mean: what is estimated are sums over many keys. Beyond 128 it may be nan, which
// changes no output: from `MOST` on, keys are read.
INLINED Singles about_power_of_two(Singles x) {
    constexpr float ONE = 1 << 23, LESS = 0.0562f;  // LESS: log2(3 / 2 * ln 2)
    return (Singles)not_negative(to_nearest(fused(x, all(ONE), all((127 - LESS) * ONE))));
}

// Adds to `sums` the products of COUNT words of a strip's codes with those of keys.
template <int COUNT, int VECTORS>
INLINED void add_codes(Singles (*sums)[VECTORS], const uint32_t (*queries)[CODE_WORDS], const uint32_t* codes) {
    Words columns[VECTORS][COUNT];
    UNROLLED for (int c = 0; c < VECTORS; c++) UNROLLED for (int word = 0; word < COUNT; word++) columns[c][word] =
        loaded<Words>(codes + word * SEGMENT + c * LANES);
    UNROLLED for (int q = 0; q < STRIP; q++) {
        Words row[COUNT];
        UNROLLED for (int word = 0; word < COUNT; word++) row[word] = Words{} + queries[q][word];
        UNROLLED for (int c = 0; c < VECTORS; c++) sums[q][c] = added_codes<COUNT>(sums[q][c], row, columns[c]);
    }
}

// Writes estimated scores of a strip with so many vectors of a segment's keys, from `first` on, to `block.scores`, and
// marks the keys that reach a query's cut in `asked`.
template <int VECTORS>
INLINED void estimate(Block& block, int strip, const FarKeys& far, int64_t segment, int first, Marks* asked) {
    const uint32_t* codes = far.codes.get() + segment * CODE_WORDS * SEGMENT + first;
    Singles sums[STRIP][VECTORS];  // integers
    UNROLLED for (int c = 0; c < VECTORS; c++) {
        const Singles correction = loaded<Singles>(far.corrections.get() + segment * SEGMENT + first + c * LANES);
        UNROLLED for (int q = 0; q < STRIP; q++) sums[q][c] = correction;
    }
    constexpr int REST = CODE_WORDS % TOGETHER, WHOLE = CODE_WORDS - REST;
    const uint32_t* query = block.query_codes[strip * STRIP];
    const auto from = [&](int word) { return (const uint32_t (*)[CODE_WORDS])(query + word); };
    for (int word = 0; word < WHOLE; word += TOGETHER) add_codes<TOGETHER>(sums, from(word), codes + word * SEGMENT);
    if constexpr (REST > 0) add_codes<REST>(sums, from(WHOLE), codes + WHOLE * SEGMENT);
    UNROLLED for (int c = 0; c < VECTORS; c++) {
        const Singles step = loaded<Singles>(far.steps.get() + segment * SEGMENT + first + c * LANES);
        Marks marks = asked[c];
        UNROLLED for (int q = 0; q < STRIP; q++) {
            const int query = strip * STRIP + q;
            const Singles score = fused(to_singles((Integers)sums[q][c]) * step, all(block.query_steps[query]),
                                        all(block.centred[segment % CHUNK][query]));
            marks |= at_least(score, all(block.cut[query]));
            store(block.scores[query] + first + c * LANES, score);
        }
        asked[c] = marks;
    }
}

// Writes scores of a chunk of centres, from `segment` on, to `block.centred`.
void score_centres(Block& block, const Call& call, const FarKeys& far, int64_t segment, int64_t segments) {
    const auto token = [&](int64_t each) { return segment + each; };
    pack_keys(far.centres.get(), DIM, segments - segment, token, block.keys);
    for (int strip = 0; strip < STRIPS; strip++) {
        alignas(64) float scores[STRIP][TILE];
        score(block.query + strip * STRIP, block.keys, scores);
        for (int q = 0; q < STRIP; q++)
            for (int each = 0; each < CHUNK; each++)
                block.centred[each][strip * STRIP + q] =
                    scores[q][each] * float(call.scaling * LOG2_E) - block.base[strip * STRIP + q];
    }
}

// Whether scores of a strip's queries with keys of a segment may reach a cut, by their mean and their spread.
bool may_reach(const Block& block, int strip, const FarKeys& far, int64_t segment) {
    const float spread = REACH * far.sizes[segment];
    bool below = true;  // not where a number is nan
    for (int q = strip * STRIP; q < (strip + 1) * STRIP; q++)
        below &= block.centred[segment % CHUNK][q] + spread * block.spreads[q] < block.cut[q];
    return !below;
}

// Adds the weights of a strip's keys from `first` to `stop`, `times` each, to the sums of a block.
INLINED void add_weights(Block& block, int strip, int first, int stop, float times, const Marks* asked) {
    for (int q = strip * STRIP; q < (strip + 1) * STRIP; q++) {
        Singles met = {}, unread = {}, lifted = {};
        UNROLLED for (int key = first; key < stop; key += LANES) {
            const Singles score = loaded<Singles>(block.scores[q] + key);
            const Singles weight = about_power_of_two(score), left = without(weight, asked[key / LANES]);
            met += weight, unread += left;
            lifted = fused(left, score, lifted);
        }
        block.met[q] = fused(all(times), met, block.met[q]);
        block.unread[q] = fused(all(times), unread, block.unread[q]);
        block.lifted[q] = fused(all(times), lifted, block.lifted[q]);
    }
}

// Scans the codes of `segments` segments of far keys: tokens to read go to `block.chosen`, and the others are added to
// the sums of unread weights. Where no key of a segment is expected to reach a strip's cuts, a sample counts for all.
void scan(Block& block, const Call& call, const FarKeys& far, int64_t segments) {
    const float share = std::log2(call.threshold / (segments * SEGMENT));
    block.chosen.clear();
    for (int q = 0; q < BLOCK; q++) block.met[q] = all(1.0f / LANES), block.unread[q] = block.lifted[q] = Singles{};
    for (int64_t segment = segments - 1; segment >= 0; segment--) {
        if (segment % CHUNK == CHUNK - 1 || segment == segments - 1)
            score_centres(block, call, far, segment / CHUNK * CHUNK, segments);
        if ((segments - 1 - segment) % (TILE / SEGMENT) == 0)
            for (int q = 0; q < BLOCK; q++) block.cut[q] = std::min(MOST, std::log2(sum_of(block.met[q])) + share);
        const int sample = segment % (SEGMENT / SAMPLED) * SAMPLED;
        Marks asked[PARTS] = {};
        bool whole[STRIPS];
        const auto estimate_keys = [&](auto vectors, int strip, int first, int stop, Marks* asked) {
            for (; first < stop; first += vectors * LANES)
                estimate<vectors>(block, strip, far, segment, first, asked + first / LANES);
        };
        for (int strip = 0; strip < STRIPS; strip++) {
            whole[strip] = may_reach(block, strip, far, segment);
            if (!whole[strip]) {
                constexpr int FITTING = std::min(AT_ONCE, SAMPLED / LANES);
                Marks found[PARTS] = {};
                estimate_keys(std::integral_constant<int, FITTING>(), strip, sample, sample + SAMPLED, found);
                for (const Marks& marks : found) whole[strip] |= bits_of(marks) != 0;
            }
            if (whole[strip]) estimate_keys(std::integral_constant<int, AT_ONCE>(), strip, 0, SEGMENT, asked);
        }
        for (int strip = 0; strip < STRIPS; strip++)
            if (whole[strip]) add_weights(block, strip, 0, SEGMENT, 1, asked);
            else add_weights(block, strip, sample, sample + SAMPLED, SEGMENT / SAMPLED, asked);
        for (int c = 0; c < PARTS; c++)
            for (uint32_t left = bits_of(asked[c]); left; left &= left - 1)
                block.chosen.push_back(call.first + segment * SEGMENT + c * LANES + __builtin_ctz(left));
    }
}

// Writes the output of a query: attention over the keys it read, merged with the estimate for unread ones.
void write(const Block& block, const Call& call, int64_t head, int64_t query, int q) {
    const Strip& strip = block.strips[q / STRIP];
    const float unread = sum_of(block.unread[q]);
    const float most = std::max(strip.peak[q % STRIP], block.base[q]);
    const float kept = std::exp2(strip.peak[q % STRIP] - most), rest = unread * std::exp2(block.base[q] - most);
    const float total = strip.total[q % STRIP] * kept + rest;
    const float mean = unread > 0 ? sum_of(block.lifted[q]) / unread + block.base[q] : 0;
    const float tilt = unread > 0 ? mean - block.mean_scores[q] : 0;
    for (int d = 0; d < VALUE_DIM; d += LANES) {
        const Singles value =
            fused(all(tilt), loaded<Singles>(block.slopes[q] + d), loaded<Singles>(block.means + DIM + d));
        const Singles own = kept / total * loaded<Singles>(strip.sums[q % STRIP] + d);
        const Singles sum = fused(all(rest / total), value, own);
        const int64_t to = head * call.out_head + query * call.out_token + d;
        if (call.narrow) store_bfloat16((uint16_t*)call.out + to, sum);
        else store((float*)call.out + to, sum);
    }
}

// Attention of a head's block of queries, number `index`. `keys` and `values` are of all tokens, packed.
void attend(Block& block, const Call& call, const FarKeys& far, int64_t head, int64_t index, const uint32_t* keys,
            const uint32_t* values, int64_t apart) {
    const int64_t start = index * BLOCK, count = std::min<int64_t>(BLOCK, call.queries - start);
    const int64_t stop = far_stop(call, start), end = call.start + start + count;
    const float scaling = call.scaling * LOG2_E;
    const int64_t segments = (stop - call.first) / SEGMENT;
    alignas(64) float states[DIM][BLOCK];
    average(far, segments, block.means);
    for (int strip = 0; strip < STRIPS; strip++) {
        alignas(64) float own[STRIP][DIM];
        for (int q = 0; q < STRIP; q++) {  // the last one again, where there are fewer
            const int64_t at = start + std::min<int64_t>(strip * STRIP + q, count - 1);
            const Number* query = call.query + head * call.query_head + at * call.query_token;
            pack_query(query, block.query[strip * STRIP + q]);
            for (int d = 0; d < DIM; d++)
                own[q][d] = widen(query[d]), states[d][strip * STRIP + q] = own[q][d] / call.weights[d];
        }
        regress(block, strip, own, far, segments, scaling);
        spread(block, strip, own, call.spreads, scaling);
    }
    encode(block, states, scaling);
    const auto meet_all = [&](const uint32_t* keys, const uint32_t* values, int64_t apart, auto visible) {
        for (int strip = 0; strip < STRIPS; strip++) {
            const int64_t most = visible(strip * STRIP + STRIP - 1);
            if (most > 0)
                meet(
                    block.strips[strip], block.query + strip * STRIP, keys, values, apart,
                    (std::min<int64_t>(most, TILE) + CHUNK - 1) / CHUNK * CHUNK,
                    [&](int q) { return visible(strip * STRIP + q); }, scaling);
        }
    };
    for (Strip& strip : block.strips) begin(strip);
    for (int64_t tile = 0; tile < call.first; tile += TILE)
        meet_all(keys + tile * WORDS, values + tile / IN_WORD * CHANNELS, apart,
                 [&](int) { return call.first - tile; });
    for (int64_t tile = stop; tile < end; tile += TILE)
        meet_all(keys + tile * WORDS, values + tile / IN_WORD * CHANNELS, apart,
                 [&](int q) { return call.start + std::min(start + q, start + count - 1) + 1 - tile; });
    for (int q = 0; q < BLOCK; q++)
        block.base[q] = block.strips[q / STRIP].peak[q % STRIP] + std::log2(block.strips[q / STRIP].total[q % STRIP]);
    scan(block, call, far, segments);
    for (size_t tile = 0; tile < block.chosen.size(); tile += TILE) {
        const int64_t left = block.chosen.size() - tile;
        for (int64_t chunk = 0; chunk < std::min<int64_t>(left, TILE); chunk += CHUNK) {
            const auto token = [&](int64_t each) { return block.chosen[tile + chunk + each]; };
            pack_keys(call.key, call.key_token, left - chunk, token, block.keys + chunk * WORDS);
            pack_values(call.value, call.value_token, left - chunk, token, block.values + chunk / IN_WORD * CHANNELS,
                        TILE / IN_WORD * CHANNELS);
        }
        meet_all(block.keys, block.values, TILE / IN_WORD * CHANNELS, [&](int) { return left; });
    }
    for (int64_t q = 0; q < count; q++) write(block, call, head, start + q, q);
#pragma omp atomic
    *call.unread += count * (segments * SEGMENT - int64_t(block.chosen.size()));
}

void attend(const Call& call) {
    const int64_t chunks = (call.tokens + CHUNK - 1) / CHUNK + TILE / CHUNK;
    const int64_t blocks = (call.queries + BLOCK - 1) / BLOCK;
    const Aligned keys(chunks * CHUNK * WORDS), values(chunks * CHUNK / IN_WORD * VALUE_DIM);
    const FarKeys far = describe(call, (far_stop(call, (blocks - 1) * BLOCK) - call.first) / SEGMENT);
    std::vector<Block> room(call.threads);
    for (Block& block : room) block.chosen.reserve(call.tokens);  // no thread may throw
    pack(call.key, call.key_token, call.value, call.value_token, call.tokens, chunks, call.threads, keys.get(),
         values.get());
    // The last ones first: they see most.
#pragma omp parallel for num_threads(call.threads) schedule(dynamic)
    for (int64_t each = blocks * call.group - 1; each >= 0; each--)
        attend(room[omp_get_thread_num()], call, far, each % call.group, each / call.group, keys.get(), values.get(),
               chunks * CHUNK / IN_WORD * CHANNELS);
}

}  // namespace

// As in prompt.cpp.
extern "C" int64_t call_size() { return sizeof(Call); }

// How codes are rounded, for tests.
extern "C" int code_levels() { return LEVELS; }
extern "C" int code_words() { return WORDS_TOGETHER; }

extern "C" int prompt_attention(const Call* call) try {
    attend(*call);
    return 0;
} catch (...) {
    return 1;
}
