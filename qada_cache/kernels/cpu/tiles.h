// Products of matrices by AMX, for operations.h: of words of pairs of bfloat16.
//
// A tile has 16 rows of 16 words. Four of the eight there are have sums, of two tiles of rows and two of columns, so
// that each tile that is loaded meets two others.

#pragma once

namespace {

constexpr int SIDE = 16;  // rows of a tile, and words of a row

// While it lives, its thread has tiles, where there are any.
struct Tiles {
    Tiles() {
        alignas(64) const struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};  // of a row
            uint8_t rows[16] = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE};
        } all;
        if constexpr (TILED) asm volatile("ldtilecfg %0" ::"m"(all));
    }
    ~Tiles() {
        if constexpr (TILED) asm volatile("tilerelease");
    }
};

// In assembly, as GCC's functions do not tell it of the memory that they read and write. `apart`: words, of rows.
template <int TILE>
INLINED void load_tile(const void* rows, int64_t apart) {
    asm volatile("tileloadd (%0,%1,4), %%tmm%c2" ::"r"(rows), "r"(apart), "i"(TILE) : "memory");
}
template <int TILE>
INLINED void store_tile(void* rows, int64_t apart) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,4)" ::"r"(rows), "r"(apart), "i"(TILE) : "memory");
}
template <int TILE>
INLINED void clear_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}
template <int SUM, int LEFT, int RIGHT>
INLINED void multiply_tile() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(LEFT), "i"(RIGHT));
}

// To `to`, [2 * SIDE][COLUMNS * SIDE]: `from`, if there is any, and the products of so many words, a multiple of SIDE,
// of as many rows, and of a matrix's. Rows are so many words apart.
template <int COLUMNS>
INLINED void multiply_by_tiles(const void* rows, int64_t apart, const void* matrix, int64_t width, int words,
                               const void* from, int64_t from_apart, void* to, int64_t to_apart) {
    constexpr bool BOTH = COLUMNS == 2;
    static_assert(COLUMNS == 1 || BOTH);
    const auto at = [](const void* first, int64_t word) { return (uint32_t*)first + word; };
    if (from) {
        load_tile<0>(from, from_apart), load_tile<1>(at(from, SIDE * from_apart), from_apart);
        if (BOTH)
            load_tile<2>(at(from, SIDE), from_apart), load_tile<3>(at(from, SIDE * from_apart + SIDE), from_apart);
    } else {
        clear_tile<0>(), clear_tile<1>();
        if (BOTH) clear_tile<2>(), clear_tile<3>();
    }
    for (int word = 0; word < words; word += SIDE) {
        load_tile<4>(at(rows, word), apart);
        load_tile<6>(at(matrix, word * width), width);
        multiply_tile<0, 4, 6>();
        load_tile<5>(at(rows, SIDE * apart + word), apart);
        multiply_tile<1, 5, 6>();
        if (BOTH) {
            load_tile<7>(at(matrix, word * width + SIDE), width);
            multiply_tile<2, 4, 7>(), multiply_tile<3, 5, 7>();
        }
    }
    store_tile<0>(to, to_apart), store_tile<1>(at(to, SIDE * to_apart), to_apart);
    if (BOTH) store_tile<2>(at(to, SIDE), to_apart), store_tile<3>(at(to, SIDE * to_apart + SIDE), to_apart);
}

}  // namespace
