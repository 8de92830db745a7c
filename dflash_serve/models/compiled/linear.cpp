// Linear layers of a step on a CPU: every weight is read from memory once and meets all rows; products are summed in fp32.
// Weights may be narrower than rows: most checkpoints are bfloat16, and computing in fp32 needs no wider copy of them.
//
// A row's result depends on that row alone, in an order that never changes: not on the rows beside it, nor on the number
// of threads. So a row verified in a block comes out bit for bit as it does alone. Built by `build.py` without
// -ffast-math, which might order the sums of one row and of eight differently. Plain C linkage, no PyTorch headers.

#include <algorithm>
#include <vector>

#include "vectors.h"

#if defined(__AVX512BF16__) && (defined(__znver3__) || defined(__znver4__) || defined(__znver5__))  // GCC 12 says 3
#include <immintrin.h>
#define PAIRS  // products of bfloat16 are twice as fast there as those of fp32; on Intel's they are slower
#endif

namespace {

constexpr int64_t BLOCK = 16;  // outputs side by side, on every machine
constexpr int64_t PARTS = BLOCK / LANES;  // vectors, each of which holds one number for each of its outputs
constexpr int64_t STRETCH = 256;  // words whose products are summed up before they are added to those of before
#if defined(__AVX512F__)
constexpr int BLOCKS = 3, ROWS = 8;  // of a tile, at most, whose sums and weights stay in registers
#elif defined(__AVX__) || defined(__aarch64__)
constexpr int BLOCKS = 1, ROWS = 6;
#else
constexpr int BLOCKS = 1, ROWS = 2;
#endif

// How weights of LANES outputs are read, word by word, and what a word of them adds to the sums of a row. PER_WORD inputs
// lie side by side in a word; X is what rows are read as, X_PER_WORD of them for each word.

struct Float32 {
    static constexpr int64_t PER_WORD = 1, X_PER_WORD = 1;
    typedef float X;
    Floats weights;
    void load(const uint32_t *from) { std::memcpy(&weights, from, sizeof weights); }
    void add(const X *x, Floats &sums) const { sums += weights * x[0]; }
};

struct Bfloat16 {
    static constexpr int64_t PER_WORD = 2, X_PER_WORD = 2;
    typedef float X;
    Floats first, second;
    void load(const uint32_t *from) {
        Words pairs;
        std::memcpy(&pairs, from, sizeof pairs);
        first = (Floats)(pairs << 16);
        second = (Floats)(pairs & 0xffff0000u);
    }
    void add(const X *x, Floats &sums) const {
        sums += first * x[0];
        sums += second * x[1];
    }
};

#ifdef PAIRS
// Both products of a word in one instruction: for rows of bfloat16, which are read as words, too.
struct Bfloat16Pairs {
    static constexpr int64_t PER_WORD = 2, X_PER_WORD = 1;
    typedef uint32_t X;
    __m512bh pairs;
    void load(const uint32_t *from) { std::memcpy(&pairs, from, sizeof pairs); }
    void add(const X *x, Floats &sums) const {
        sums = (Floats)_mm512_dpbf16_ps((__m512)sums, pairs, (__m512bh)_mm512_set1_epi32(int(x[0])));
    }
};
#else
typedef Bfloat16 Bfloat16Pairs;
#endif

template <class T, class Weight>
struct Linear {
    typedef typename Weight::X X;
    const uint32_t *weights;  // [outputs / BLOCK, words, BLOCK]
    const T *bias;            // [outputs] or null
    const X *x;               // [rows, inputs]
    T *out;                   // [rows, outputs]
    int64_t words, outputs;

    // N blocks of outputs from `block` on, of R rows from `row` on.
    template <int N, int R>
    void tile(int64_t block, int64_t row) const {
        constexpr int V = N * PARTS;
        Floats totals[R][V] = {};
        for (int64_t from = 0; from < words; from += STRETCH) {
            Floats sums[R][V] = {};
            for (int64_t word = from; word < std::min(words, from + STRETCH); word++) {
                Weight weight[V];
                for (int v = 0; v < V; v++)
                    weight[v].load(weights + ((block + v / PARTS) * words + word) * BLOCK + v % PARTS * LANES);
                for (int r = 0; r < R; r++)
                    for (int v = 0; v < V; v++)
                        weight[v].add(x + ((row + r) * words + word) * Weight::X_PER_WORD, sums[r][v]);
            }
            for (int r = 0; r < R; r++)
                for (int v = 0; v < V; v++) totals[r][v] += sums[r][v];
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) store(row + r, block * BLOCK + v * LANES, totals[r][v]);
    }

    void store(int64_t row, int64_t first, Floats sums) const {
        for (int64_t i = 0; i < std::min(LANES, outputs - first); i++) {
            const float more = bias == nullptr ? 0 : up(bias[first + i]);
            put(out[row * outputs + first + i], sums[i] + more);
        }
    }

    // R rows or fewer.
    template <int N, int R>
    void tile_of(int64_t block, int64_t row, int64_t rows) const {
        if constexpr (R > 1)
            if (rows < R) return tile_of<N, R - 1>(block, row, rows);
        tile<N, R>(block, row);
    }

    // N blocks of outputs of all rows, which tiles share evenly.
    template <int N>
    void strip(int64_t block, int64_t rows) const {
        const int64_t tiles = (rows + ROWS - 1) / ROWS;
        for (int64_t i = 0; i < tiles; i++) {
            const int64_t row = rows * i / tiles, end = rows * (i + 1) / tiles;
            tile_of<N, ROWS>(block, row, end - row);
        }
    }
};

// [outputs, inputs] -> [outputs / BLOCK, words, BLOCK], missing outputs zero; inputs fill whole words.
template <class T>
void pack(const T *weights, uint32_t *packed, int64_t inputs, int64_t outputs) {
    constexpr int64_t PER_WORD = 4 / sizeof(T);
    const int64_t words = inputs / PER_WORD;
    for (int64_t block = 0; block * BLOCK < outputs; block++)
        for (int64_t word = 0; word < words; word++)
            for (int64_t i = 0; i < BLOCK; i++) {
                uint32_t &place = packed[(block * words + word) * BLOCK + i];
                const int64_t output = block * BLOCK + i;
                place = 0;
                if (output < outputs) std::memcpy(&place, weights + output * inputs + word * PER_WORD, 4);
            }
}

// Rows as they are multiplied.
inline const float *rows_as(const float *x, int64_t, const float *) { return x; }
inline const uint32_t *rows_as(const bfloat16 *x, int64_t, const uint32_t *) {
    return reinterpret_cast<const uint32_t *>(x);
}
inline const float *rows_as(const bfloat16 *x, int64_t count, const float *) {
    static thread_local std::vector<float> kept;
    kept.resize(count);
    for (int64_t i = 0; i < count; i++) kept[i] = up(x[i]);
    return kept.data();
}

// x [rows, inputs] -> out [rows, outputs].
template <class T, class Weight>
void linear(const T *x, const uint32_t *weights, const T *bias, T *out, int64_t rows, int64_t inputs, int64_t outputs,
            int threads) {
    const typename Weight::X *as_multiplied = nullptr;
    as_multiplied = rows_as(x, rows * inputs, as_multiplied);
    const Linear<T, Weight> layer{weights, bias, as_multiplied, out, inputs / Weight::PER_WORD, outputs};
    const int64_t blocks = (outputs + BLOCK - 1) / BLOCK, strips = (blocks + BLOCKS - 1) / BLOCKS;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t strip = 0; strip < strips; strip++) {
        const int64_t block = strip * BLOCKS, end = std::min(blocks, block + BLOCKS);
        if (end - block == BLOCKS)
            layer.template strip<BLOCKS>(block, rows);
        else
            for (int64_t one = block; one < end; one++) layer.template strip<1>(one, rows);
    }
}

}  // namespace

#define PACK(NAME, T)                                                                                                 \
    extern "C" void pack_##NAME(const T *weights, uint32_t *packed, int64_t inputs, int64_t outputs) {                 \
        pack(weights, packed, inputs, outputs);                                                                       \
    }
#define LINEAR(NAME, T, Weight)                                                                                       \
    extern "C" void linear_##NAME(const T *x, const uint32_t *weights, const T *bias, T *out, int64_t rows,            \
                                  int64_t inputs, int64_t outputs, int threads) {                                     \
        linear<T, Weight>(x, weights, bias, out, rows, inputs, outputs, threads);                                     \
    }

PACK(float32, float)
PACK(bfloat16, bfloat16)
LINEAR(float32_by_float32, float, Float32)
LINEAR(float32_by_bfloat16, float, Bfloat16)
LINEAR(bfloat16_by_bfloat16, bfloat16, Bfloat16Pairs)
