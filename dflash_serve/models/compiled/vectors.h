// Vectors of as many numbers as an instruction takes.

#pragma once

#include <algorithm>
#include <cstdlib>

#include "numbers.h"

namespace {

#if defined(__AVX512F__)
constexpr int64_t LANES = 16;
#elif defined(__AVX__)
constexpr int64_t LANES = 8;
#else
constexpr int64_t LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Places __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

inline Floats load(const float *from) {
    Floats out;
    std::memcpy(&out, from, sizeof out);
    return out;
}
inline Floats load(const bfloat16 *from) {
    Halves bits;
    std::memcpy(&bits, from, sizeof bits);
    return (Floats)(__builtin_convertvector(bits, Words) << 16);
}
template <class T>
inline Floats load(const T *from, int64_t count) {  // zeros behind `count` numbers
    if (count >= LANES) return load(from);
    T some[LANES] = {};
    std::memcpy(some, from, count * sizeof(T));
    return load(some);
}

// Rows of LANES numbers to columns: log2(LANES) times, the first half's numbers between those of the second half.
inline void turn(Floats (&x)[LANES]) {
#ifdef __clang__
    float rows[LANES][LANES], columns[LANES][LANES];
    std::memcpy(rows, x, sizeof rows);
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) columns[j][i] = rows[i][j];
    std::memcpy(x, columns, sizeof columns);
#else
    Places low, high;
    for (int i = 0; i < LANES; i++) low[i] = i / 2 + i % 2 * LANES;
    high = low + int(LANES / 2);
    for (int size = LANES; size > 1; size /= 2) {
        Floats mixed[LANES];
        for (int i = 0; i < LANES / 2; i++) {
            mixed[2 * i] = __builtin_shuffle(x[i], x[i + LANES / 2], low);
            mixed[2 * i + 1] = __builtin_shuffle(x[i], x[i + LANES / 2], high);
        }
        std::memcpy(x, mixed, sizeof mixed);
    }
#endif
}

// Keys [count, dim], LANES of them at most, side by side: [dim] vectors, zeros in the lanes of none.
template <class T>
void transpose(const T *keys, int64_t count, int64_t dim, Floats *out) {
    for (int64_t from = 0; from < dim; from += LANES) {
        Floats square[LANES] = {};
        for (int64_t key = 0; key < std::min(count, LANES); key++)
            square[key] = load(keys + key * dim + from, dim - from);
        turn(square);
        std::copy(square, square + std::min(LANES, dim - from), out + from);
    }
}

// Numbers that vectors may lie in.
struct Aligned {
    explicit Aligned(int64_t size) : data(static_cast<float *>(std::aligned_alloc(64, (size * 4 + 63) / 64 * 64))) {}
    ~Aligned() { std::free(data); }
    Aligned(const Aligned &) = delete;
    Aligned &operator=(const Aligned &) = delete;
    float *data;
};

}  // namespace
