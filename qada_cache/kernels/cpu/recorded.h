// Attention of a head's queries over tokens in records: by codes, or decoded if values are channels of keys.

#pragma once

#include "decide.h"
#if VALUES_IN_KEYS && KEY_BITS > 0
#include "latent_records.h"
#endif

namespace {

#if VALUES_IN_KEYS && KEY_BITS > 0
// As `RecordAttention` (coded.h), of all of the head's queries.
struct DecodedAttention {
    static constexpr int BLOCKS = (QUERIES + LANES - 1) / LANES;
    const Decoding by;
    const float scaling;
    const std::unique_ptr<Recorded> room{new Recorded};
    const std::unique_ptr<Block[]> blocks{new Block[BLOCKS]};

    // All `queries` [QUERIES, DIM] of the head attend, whichever ask.
    DecodedAttention(const Decoding& by, const Element* queries, float scaling) : by(by), scaling(scaling) {
        for (int b = 0; b < BLOCKS; b++) blocks[b].begin(queries + b * LANES * DIM, QUERIES - b * LANES);
    }

    void add_spans(int64_t start, int64_t stop) { add(ContiguousPlaces{}, start, stop); }
    void add_listed(const int32_t* tokens, int64_t count) { add(IndexedPlaces{tokens, count, 0}, 0, count); }

    // Adds tokens `places[start]` to `places[stop - 1]`, in tiles that lie in one segment each.
    template <typename Places>
    void add(Places places, int64_t start, int64_t stop) {
        for (int64_t first = start, next; first < stop; first = next) {
            const int64_t end = by.end_of(places[first]);
            for (next = first + 1; next < std::min(first + TILE, stop) && places[next] < end;) next++;
            const int count = (int)(next - first);
            meet_all(room->load(by, places, first, count), count, scaling, blocks.get(), BLOCKS);
        }
    }

    // As `Attention::finish`.
    void finish(float* out, float* lse) const {
        for (int b = 0; b < BLOCKS; b++) blocks[b].finish(QUERIES - b * LANES, out + b * LANES * RANK, lse + b * LANES);
    }
};

DecodedAttention attend_to_records(const Decode& call, const Selecting&, int64_t row, int64_t head) {
    const Decoding by{call.codes.at(row, head),
                      call.codes.head_stride / call.words.count(),
                      call.scales.at(row, head),
                      call.units.at(row, head),
                      call.centres.at(row, head),
                      call.weights.at(row, head),
                      call.order.at(row, head),
                      call.record_weights.at(row, head),
                      call.segment_tokens,
                      call.count_segments(call.bulk_length(row)),
                      call.words,
                      call.record_places(row, head)};
    return {by, call.query + (row * call.kv_heads + head) * QUERIES * DIM, call.scaling};
}
#else
RecordAttention attend_to_records(const Decode& call, const Selecting& selecting, int64_t row, int64_t head) {
    return {selecting.estimates(call, row, head), call.record_places(row, head), selecting.turned, selecting.asking};
}
#endif

}  // namespace
