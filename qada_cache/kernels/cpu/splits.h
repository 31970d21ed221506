// How the work of a call of attention is shared by threads.

#pragma once

#include <algorithm>
#include <cstdint>

namespace {

constexpr int SHARES = 4;  // parts of the work for each thread, as threads do not all start at once

// The number of parts to split each head's keys into, so that `threads` share the work of `heads` heads.
int64_t count_splits(int64_t tokens, int64_t heads, int threads, int64_t split_tokens) {
    int64_t wanted = threads == 1 ? 1 : (SHARES * threads + heads - 1) / heads;
    return std::max<int64_t>(1, std::min(wanted, tokens / split_tokens));
}

}  // namespace
