// Attention of a few tokens' queries, all heads of them, to latents. `attend_latents` (latent.py) builds this file for
// each dtype and number of channels when it first needs one.

#if KEY_BITS > 0
#include "coding.h"
#include "latent_records.h"
#else
#include "latent.h"
#endif

namespace {

constexpr int64_t SHARES = 2;  // of the work, for each thread

// The arguments, `Call` of latent.py.
struct Call {
    const Element* query;  // [batch, queries, DIM]
    const Element* latents;  // [batch, tokens, DIM], rows so many elements apart
    float *out, *lse;  // [batch, queries, RANK], [batch, queries]
    int64_t batch, queries, tokens, row_stride, split_tokens, threads;
    double scaling;
};

// Room for a tile of latents that lie in no records.
struct Stored {
#if PAIRS
    using Found = Tile<WORDS, 1, SUMMED_CHANNELS, 1>;
    alignas(CACHE_LINE) Word values[TOKEN_WORDS][SUMMED_CHANNELS];  // neighbouring tokens
#elif defined(FLOAT32)
    using Found = Tile<DIM, 1, DIM, 1>;
#else
    using Found = Tile<DIM, 1, DIM, 1>;
    alignas(CACHE_LINE) Word wide[TILE][DIM];
#endif
    alignas(CACHE_LINE) Element rest[TILE][DIM];

    // Makes a tile of `count` tokens. If it is full, the tokens behind it are prefetched as the next tile.
    Found load(const Element* latents, int count) {
        const char* next = count == TILE ? (const char*)(latents + TILE * DIM) : nullptr;
        if (count < TILE) {
            std::memset(rest, 0, sizeof rest);
            std::memcpy(rest, latents, count * sizeof *rest);
            latents = rest[0];
        }
#if PAIRS
        for (int t = 0; t < TILE; t += 2)
            for (int d = 0; d < SUMMED_CHANNELS; d++)
                values[t / 2][d] = latents[t * DIM + d] | (uint32_t)latents[(t + 1) * DIM + d] << 16;
        return {(const Word*)latents, values[0], next};
#elif defined(FLOAT32)
        return {latents, latents, next};
#else
        for (int t = 0; t < TILE; t++)
#if defined(FLOAT16)
            for (int d = 0; d < DIM; d += WIDTH) store(&wide[t][d], widen<WIDTH>(latents + t * DIM + d));
#else
            for (int d = 0; d < DIM; d++) wide[t][d] = widen(latents[t * DIM + d]);
#endif
        return {wide[0], wide[0], next};
#endif
    }
};

// Splits tokens among threads, and merges their results. Each thread has a `Room`, where `load(room, row, first,
// count)` makes tiles.
template <typename Room, typename Load>
void attend(const Call& call, Load load) {
    const int64_t number = (call.queries + LANES - 1) / LANES, tiles = (call.tokens + TILE - 1) / TILE;
    const int64_t wanted = call.threads == 1 ? 1 : (SHARES * call.threads + call.batch - 1) / call.batch;
    const int64_t splits = std::max<int64_t>(1, std::min({wanted, tiles, call.tokens / call.split_tokens}));
    std::unique_ptr<Block[]> blocks(new Block[call.batch * splits * number]);
    bool failed = false;
#pragma omp parallel num_threads(call.threads) reduction(|| : failed)
    {
        std::unique_ptr<Room> room(new (std::nothrow) Room);
        failed = !room;
#pragma omp for schedule(dynamic)
        for (int64_t job = 0; job < call.batch * splits; job++) {
            const int64_t row = job / splits, split = job % splits;
            const int64_t stop = std::min(tiles * (split + 1) / splits * TILE, call.tokens);
            Block* own = &blocks[job * number];
            for (int64_t b = 0; b < number; b++)
                own[b].begin(call.query + (row * call.queries + b * LANES) * DIM, call.queries - b * LANES);
            for (int64_t first = tiles * split / splits * TILE; room && first < stop; first += TILE) {
                const int count = (int)std::min<int64_t>(TILE, stop - first);
                meet_all(load(*room, row, first, count), count, (float)call.scaling, own, number);
            }
        }
    }
    if (failed) throw std::bad_alloc();
#pragma omp parallel for num_threads(call.threads)
    for (int64_t each = 0; each < call.batch * number; each++) {
        const int64_t row = each / number, b = each % number, first = row * call.queries + b * LANES;
        Block& whole = blocks[row * splits * number + b];
        for (int64_t split = 1; split < splits; split++) whole.merge(blocks[(row * splits + split) * number + b]);
        whole.finish(call.queries - b * LANES, call.out + first * RANK, call.lse + first);
    }
}

#if KEY_BITS > 0
Decoding decoding_of(const Coding& call, int64_t row) {
    return {
        call.codes.at(row),   call.room,
        call.scales.at(row),  call.units.at(row),
        call.centres.at(row), call.weights.at(row),
        call.order.at(row),   call.record_weights.at(row),
        call.segment_tokens,  call.segments,
        call.words,           {call.records.at(row), call.records.at(row) + call.tokens * RECORD_SIZE, call.tokens}};
}
#endif

}  // namespace

// latent.py compares this with the size of its own structure before the first call.
extern "C" int64_t call_size() { return sizeof(Call); }

// Returns 1 if memory ran out.
extern "C" int latent_attention(const Call* call) try {
    attend<Stored>(*call, [&](Stored& room, int64_t row, int64_t first, int count) {
        return room.load(call->latents + row * call->row_stride + first * DIM, count);
    });
    return 0;
} catch (...) {
    return 1;
}

#if KEY_BITS > 0
extern "C" int64_t coding_size() { return sizeof(Coding); }

// Attention over the first tokens of a bulk, in records. Returns 1 if memory ran out.
extern "C" int recorded_latent_attention(const Call* call, const Coding* coding) try {
    attend<Recorded>(*call, [&](Recorded& room, int64_t row, int64_t first, int count) {
        return room.load(decoding_of(*coding, row), ContiguousPlaces{}, first, count);
    });
    return 0;
} catch (...) {
    return 1;
}
#endif
