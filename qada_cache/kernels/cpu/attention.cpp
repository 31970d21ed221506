// The CPU's decode step, with the contract of its reference in Python, which it is tested against: `decode_step`
// (decode_reference.py). `__init__.py` builds this file once for every shape it meets.

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

// compiled_decode.py compares this with the size of its own structure before the first call.
extern "C" int64_t decode_size() { return sizeof(Decode); }

// Returns 1 if memory ran out: `out` and `flags` are then of no use, and nothing is counted.
extern "C" int fused_decode(const Decode* given) try {
    decode(*given);
    return 0;
} catch (...) {
    return 1;
}
