// Runs the C++ kernels in a process of their own, without Python, which another processor may be emulated for:
// `emulated.py` asks for calls on the standard input, and reads the memory that they have left on the standard output.
//
// A call, in integers of 64 bits and bytes: the library's path and the function's name, the arguments, which are a
// structure's bytes or, for partial attention, numbers; the blocks of memory that pointers are into; and the pointers,
// each by its place in the arguments, its block, and its place in that. The answer is what the function returned, and
// the blocks.

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

static int64_t number() {
    int64_t value;
    if (fread(&value, sizeof value, 1, stdin) != 1) exit(0);  // there are no more calls
    return value;
}

static void read_into(void* to, size_t size) {
    if (size && fread(to, size, 1, stdin) != 1) exit(1);
}

static std::string text() {
    std::string read(number(), 0);
    read_into(read.data(), read.size());
    return read;
}

// As `partial_attention` of partial.cpp: five pointers, eight sizes, threads, and the scaling.
static int attend_partially(void* function, const int64_t* at) {
    using Part = int (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                         int64_t, int64_t, int64_t, int, float);
    double scaling;
    memcpy(&scaling, at + 14, sizeof scaling);
    return ((Part)function)(at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7], at[8], at[9], at[10], at[11],
                            at[12], (int)at[13], (float)scaling);
}

int main() {
    std::map<std::string, void*> libraries;
    for (;;) {
        const std::string path = text(), name = text();
        std::vector<int64_t> arguments((number() + 7) / 8 + 1);
        read_into(arguments.data(), number());
        struct Block {
            char* data;
            size_t size;
        };
        std::vector<Block> blocks(number());
        for (Block& block : blocks) {
            block.size = number();
            block.data = (char*)aligned_alloc(64, (block.size + 127) / 64 * 64);
            read_into(block.data, block.size);
        }
        for (int64_t left = number(); left; left--) {
            const int64_t place = number(), block = number(), offset = number();
            char* const pointer = blocks[block].data + offset;
            memcpy((char*)arguments.data() + place, &pointer, sizeof pointer);
        }
        void*& library = libraries[path];
        if (!library) library = dlopen(path.c_str(), RTLD_NOW);
        void* function = library ? dlsym(library, name.c_str()) : nullptr;
        if (!function) {
            fprintf(stderr, "%s\n", dlerror());
            return 1;
        }
        const int64_t returned = name == "partial_attention" ? attend_partially(function, arguments.data())
                                                             : ((int (*)(void*))function)(arguments.data());
        fwrite(&returned, sizeof returned, 1, stdout);
        for (const Block& block : blocks) {
            if (block.size) fwrite(block.data, block.size, 1, stdout);
            free(block.data);
        }
        fflush(stdout);
    }
}
