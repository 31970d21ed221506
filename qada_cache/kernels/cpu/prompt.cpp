// Exact attention of many queries: the contract of `partial_attention` (reference.py), causal or not. `prompt.py`
// builds this file, with the macros of prompt.h.

#include "prompt.h"

namespace {

constexpr int BLOCK = 96;  // the most queries of a job
static_assert(BLOCK % STRIP == 0);

struct Strides {
    int64_t batch, head, token;  // in elements; those of a token lie one after the other
};

// The arguments, `Call` of prompt.py.
struct Call {
    const Number *query, *key, *value;  // [batch, heads or kv_heads, queries or tokens, DIM or VALUE_DIM]
    void* out;                            // [batch, heads, queries, VALUE_DIM], bfloat16 or float32
    float* lse;                           // [batch, heads, queries] contiguous, of natural logarithms, or null
    Strides query_strides, key_strides, value_strides, out_strides;
    int64_t batch, heads, kv_heads, queries, tokens;
    int64_t causal;                       // whether query `i` sees tokens up to `tokens - queries + i` alone, or all
    int64_t narrow;                       // whether `out` is bfloat16
    int64_t threads;
    double scaling;
};

void write(const Call& call, const Strip& strip, int q, int64_t batch, int64_t head, int64_t query) {
    const Strides& strides = call.out_strides;
    const int64_t at = batch * strides.batch + head * strides.head + query * strides.token;
    const float share = 1 / strip.total[q];
    for (int d = 0; d < VALUE_DIM; d += LANES) {
        const Singles row = share * loaded<Singles>(strip.sums[q] + d);
        if (call.narrow) store_bfloat16((uint16_t*)call.out + at + d, row);
        else store((float*)call.out + at + d, row);
    }
    if (call.lse)
        call.lse[(batch * call.heads + head) * call.queries + query] =
            (strip.peak[q] + std::log2(strip.total[q])) * LN_2;
}

// Queries of each job, whole strips: so many that all threads get as many, as far as strips allow. They wait for the
// last one.
int64_t find_block(int64_t queries, int64_t threads) {
    const int64_t most = BLOCK * threads, jobs = std::max<int64_t>((queries + most - 1) / most, 1) * threads;
    return std::clamp<int64_t>(((queries + jobs - 1) / jobs + STRIP - 1) / STRIP * STRIP, STRIP, BLOCK);
}

// Attention of the queries from `start` to `stop`, of all heads that share the packed `keys` and `values`. All heads
// attend to a tile before the next one.
void attend(const Call& call, int64_t batch, int64_t kv_head, int64_t start, int64_t stop, const uint32_t* keys,
            const uint32_t* values, int64_t apart, Strip* strips) {
    const int64_t group = call.heads / call.kv_heads;
    const int64_t ahead = call.causal ? call.tokens - call.queries : call.tokens;  // seen by query 0, less itself
    const auto seen = [&](int64_t query) { return std::min(ahead + query + 1, call.tokens); };
    const int count = (stop - start + STRIP - 1) / STRIP;
    const float scaling = call.scaling * LOG2_E;
    for (int64_t each = 0; each < group * count; each++) begin(strips[each]);
    for (int64_t tile = 0; tile < seen(stop - 1); tile += TILE)
        for (int64_t each = 0; each < group * count; each++) {
            const int64_t head = kv_head * group + each / count, first = start + each % count * STRIP;
            const int64_t last = std::min(first + STRIP, stop) - 1, most = seen(last) - tile;
            if (most <= 0) continue;
            const int columns = std::min<int64_t>(TILE, (most + CHUNK - 1) / CHUNK * CHUNK);
            uint32_t query[STRIP][WORDS] = {};
            for (int q = 0; q < STRIP; q++)  // the last one again, where there are fewer
                pack_query(call.query + batch * call.query_strides.batch + head * call.query_strides.head +
                               std::min(first + q, last) * call.query_strides.token,
                           query[q]);
            const auto visible = [&](int q) { return seen(std::min(first + q, last)) - tile; };
            meet(strips[each], query, keys + tile * WORDS, values + tile / IN_WORD * CHANNELS, apart, columns, visible,
                 scaling);
        }
    for (int64_t each = 0; each < group * count; each++)
        for (int64_t q = 0, first = start + each % count * STRIP; q < STRIP && first + q < stop; q++)
            write(call, strips[each], q, batch, kv_head * group + each / count, first + q);
}

void attend(const Call& call) {
    const int64_t chunks = (call.tokens + TILE - 1) / TILE * (TILE / CHUNK), group = call.heads / call.kv_heads;
    const int64_t size = find_block(call.queries, call.threads), blocks = (call.queries + size - 1) / size;
    const int64_t strips = group * (size / STRIP);
    const Aligned keys(chunks * CHUNK * WORDS), values(chunks * CHUNK / IN_WORD * VALUE_DIM);
    std::unique_ptr<Strip[]> room(new Strip[call.threads * strips]);
    for (int64_t each = 0; each < call.batch * call.kv_heads; each++) {
        const int64_t batch = each / call.kv_heads, head = each % call.kv_heads;
        const Number* key = call.key + batch * call.key_strides.batch + head * call.key_strides.head;
        const Number* value = call.value + batch * call.value_strides.batch + head * call.value_strides.head;
        pack(key, call.key_strides.token, value, call.value_strides.token, call.tokens, chunks, call.threads,
             keys.get(), values.get());
#pragma omp parallel num_threads(call.threads)
        {
            const Tiles tiles;
            // The last ones first: they see most.
#pragma omp for schedule(dynamic)
            for (int64_t block = blocks - 1; block >= 0; block--)
                attend(call, batch, head, block * size, std::min((block + 1) * size, call.queries), keys.get(),
                       values.get(), chunks * CHUNK / IN_WORD * CHANNELS, &room[omp_get_thread_num() * strips]);
        }
    }
}

}  // namespace

// prompt.py compares this with the size of its own structure before the first call.
extern "C" int64_t call_size() { return sizeof(Call); }

// How queries are shared out, for tests.
extern "C" int64_t block_size(int64_t queries, int64_t threads) { return find_block(queries, threads); }

// Returns 1 if memory ran out.
extern "C" int prompt_attention(const Call* call) try {
    attend(*call);
    return 0;
} catch (...) {
    return 1;
}
