// Where records lie, and what their sketch says of them: the arguments of kernels that make or decode them.

#pragma once

#include "decide.h"

namespace {

// The arguments, `Coding` of recording.py.
struct Coding {
    View<uint8_t> records;
    View<const uint32_t> codes;  // these and the next ones as in `Sketch` (sketch/codec.py)
    View<const uint8_t> scales;
    View<const float> units;
    View<const uint16_t> centres, weights;
    View<const Channel> order;
    View<const float> record_weights;  // [DIM], `m` of sketch/coded.py
    View<float> keys, values;  // [tokens, DIM] and [tokens, VALUE_DIM]
    int64_t key_stride, value_stride;  // numbers from one token's to the next one's
    int64_t batch, heads, tokens, first;  // of the bulk's tokens, the first one
    int64_t room, segment_tokens, segments, threads;  // of codes, the tokens between two words
    Words words;
};

}  // namespace
