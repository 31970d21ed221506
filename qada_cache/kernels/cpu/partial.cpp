// The CPU's `partial_attention`, with the contract of its reference in Python (reference.py), which it is tested
// against. A file of its own, as it takes a third of the time that attention.cpp takes to build.

#include "partial.h"
#include "splits.h"

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
