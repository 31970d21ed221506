// The CPU's kernels, each with the contract of its reference in Python, which it is tested against: `partial_attention`
// (reference.py) and `decode_step` (decode_reference.py). `__init__.py` builds this file once for every shape it meets.

#include "step.h"

namespace {

// Many heads with a sketch are shared among threads: each thread computes all phases of a few heads, so that results of
// a phase stay in its own caches. If there are few heads, or no sketch, all threads compute one phase of all heads.
void decode(const Decode& call) {
    const int64_t heads = call.batch * call.kv_heads,
                  shares = std::max<int64_t>(SHARES * call.threads, heads / MOST_HEADS);
    int64_t bulk_read_bytes = 0, sketch_read_bytes = 0;
    bool failed = false;
    std::unique_ptr<Reading> reading;
    if (call.batch > 1 && !call.near_keys.row_stride) reading.reset(new Reading(call));
    auto run = [&](int64_t first, int64_t stop, int threads, int64_t& bulk, int64_t& sketch) {
        static thread_local std::vector<Scan> pool;  // each thread has its own
        try {
            Share part(call, first, stop - first, threads, pool, reading.get());
            part.run();
            bulk += part.bulk_read_bytes;
            sketch += part.sketch_read_bytes;
            return true;
        } catch (...) {
            pool.clear();  // scans that could not grow are half as long as they say
            return false;
        }
    };
    if (heads < shares || !call.codes.data || !call.selects)
        failed = !run(0, heads, call.threads, bulk_read_bytes, sketch_read_bytes);
    else
#pragma omp parallel for num_threads(call.threads) schedule(dynamic) reduction(+ : bulk_read_bytes, sketch_read_bytes) \
    reduction(|| : failed)
        for (int64_t share = 0; share < shares; share++)
            failed |= !run(heads * share / shares, heads * (share + 1) / shares, 1, bulk_read_bytes, sketch_read_bytes);
    if (failed) throw std::bad_alloc();
    if (reading) reading->add_to(bulk_read_bytes, sketch_read_bytes);
    if (call.bulk_read_bytes) *call.bulk_read_bytes += bulk_read_bytes;
    if (call.sketch_read_bytes) *call.sketch_read_bytes += sketch_read_bytes;
}

}  // namespace

// `query` [batch, heads, QUERIES, DIM] contiguous; `key` and `value` [batch, heads, tokens, *], whose rows of a head
// are contiguous and whose batches and heads are so many elements apart; `out` [batch, heads, QUERIES, VALUE_DIM] and
// `lse` [batch, heads, QUERIES]. Returns 1 if memory ran out.
extern "C" int partial_attention(const Element* query, const Element* key, const Element* value, float* out, float* lse,
                                 int64_t batch, int64_t heads, int64_t tokens, int64_t key_batch, int64_t key_head,
                                 int64_t value_batch, int64_t value_head, int64_t split_tokens, int threads,
                                 float scaling) try {
    int64_t splits = count_splits(tokens, batch * heads, threads, split_tokens);
    std::vector<float> parts(batch * heads * splits * SIZE), part_lse(batch * heads * splits * QUERIES);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t job = 0; job < batch * heads * splits; job++) {
        int64_t head = job / splits, split = job % splits;
        int64_t start = tokens * split / splits, stop = tokens * (split + 1) / splits;
        Attention partial(query + head * QUERIES * DIM, scaling);
        partial.add(key + head / heads * key_batch + head % heads * key_head + start * DIM,
                    value + head / heads * value_batch + head % heads * value_head + start * VALUE_STRIDE,
                    stop - start);
        partial.finish(&parts[job * SIZE], &part_lse[job * QUERIES]);
    }
    for (int64_t head = 0; head < batch * heads; head++)
        for (int q = 0; q < QUERIES; q++)
            merge(&parts[head * splits * SIZE], &part_lse[head * splits * QUERIES], splits, q,
                  out + (head * QUERIES + q) * VALUE_DIM, lse + head * QUERIES + q);
    return 0;
} catch (...) {
    return 1;
}

// compiled_decode.py compares this with the size of its own structure before the first call.
extern "C" int64_t decode_size() { return sizeof(Decode); }

// Returns 1 if memory ran out: `out` and `flags` are then of no use, and nothing is counted.
extern "C" int fused_decode(const Decode* given) try {
    decode(*given);
    return 0;
} catch (...) {
    return 1;
}
