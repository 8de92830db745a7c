// Linear layers of a step on a CPU: every weight is read from memory once and meets all rows; products are summed in fp32.
// Weights may be narrower than rows: most checkpoints are bfloat16, and computing in fp32 needs no wider copy of them.
//
// A row's result depends on that row alone, in an order that never changes: not on the rows beside it, nor on the number
// of threads. So a row verified in a block comes out bit for bit as it does alone. Built by `build.py` without
// -ffast-math, which might order the sums of one row and of eight differently. Plain C linkage, no PyTorch headers.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t LANES = 16;  // outputs side by side, for each of which a vector holds one number
constexpr int64_t STRETCH = 256;  // words whose products are summed up before they are added to those of before
#ifdef __AVX512F__
constexpr int BLOCKS = 3, ROWS = 8;  // of a tile, whose sums stay in registers
#else
constexpr int BLOCKS = 1, ROWS = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

struct bfloat16 {
    uint16_t bits;
};

inline float up(float x) { return x; }
inline float up(bfloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

inline void put(float &place, float x) { place = x; }
inline void put(bfloat16 &place, float x) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    place.bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Weights of LANES outputs, read word by word: a word holds one float, or two bfloat16 of inputs side by side.
template <class Weight>
constexpr int64_t PER_WORD = 4 / sizeof(Weight);

inline void unpack(const uint32_t *from, Floats (&to)[1]) { std::memcpy(&to[0], from, sizeof to[0]); }
inline void unpack(const uint32_t *from, Floats (&to)[2]) {
    Words pairs;
    std::memcpy(&pairs, from, sizeof pairs);
    to[0] = (Floats)(pairs << 16);
    to[1] = (Floats)(pairs & 0xffff0000u);
}

// T is what rows are made of, P how many inputs are in a word.
template <class T, int64_t P>
struct Linear {
    const uint32_t *weights;  // [outputs / LANES, words, LANES]
    const T *bias;            // [outputs] or null
    const float *x;           // [rows, inputs]
    T *out;                   // [rows, outputs]
    int64_t words, outputs;

    // N blocks of outputs from `block` on, of R rows from `row` on.
    template <int N, int R>
    void tile(int64_t block, int64_t row) const {
        Floats totals[R][N] = {};
        for (int64_t from = 0; from < words; from += STRETCH) {
            Floats sums[R][N] = {};
            for (int64_t word = from; word < std::min(words, from + STRETCH); word++) {
                Floats weight[N][P];
                for (int n = 0; n < N; n++) unpack(weights + ((block + n) * words + word) * LANES, weight[n]);
                for (int r = 0; r < R; r++) {
                    const float *mine = x + ((row + r) * words + word) * P;
                    for (int p = 0; p < P; p++)
                        for (int n = 0; n < N; n++) sums[r][n] += weight[n][p] * mine[p];
                }
            }
            for (int r = 0; r < R; r++)
                for (int n = 0; n < N; n++) totals[r][n] += sums[r][n];
        }
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) store(row + r, (block + n) * LANES, totals[r][n]);
    }

    void store(int64_t row, int64_t first, Floats sums) const {
        for (int64_t i = 0; i < std::min(LANES, outputs - first); i++) {
            const float more = bias == nullptr ? 0 : up(bias[first + i]);
            put(out[row * outputs + first + i], sums[i] + more);
        }
    }

    // N blocks of outputs of all rows.
    template <int N>
    void strip(int64_t block, int64_t rows) const {
        int64_t row = 0;
        for (; row + ROWS <= rows; row += ROWS) tile<N, ROWS>(block, row);
        switch (rows - row) {
            case 1: return tile<N, 1>(block, row);
            case 2: return tile<N, 2>(block, row);
            case 3: return tile<N, 3>(block, row);
            case 4: return tile<N, 4>(block, row);
            case 5: return tile<N, 5>(block, row);
            case 6: return tile<N, 6>(block, row);
            case 7: return tile<N, 7>(block, row);
        }
    }
};

// [outputs, inputs] -> [outputs / LANES, words, LANES], missing outputs zero; inputs fill whole words.
template <class Weight>
void pack(const Weight *weights, uint32_t *packed, int64_t inputs, int64_t outputs) {
    constexpr int64_t P = PER_WORD<Weight>;
    const int64_t words = inputs / P;
    for (int64_t block = 0; block * LANES < outputs; block++)
        for (int64_t word = 0; word < words; word++)
            for (int64_t i = 0; i < LANES; i++) {
                uint32_t &place = packed[(block * words + word) * LANES + i];
                const int64_t output = block * LANES + i;
                place = 0;
                if (output < outputs) std::memcpy(&place, weights + output * inputs + word * P, 4);
            }
}

inline const float *in_fp32(const float *x, int64_t) { return x; }
inline const float *in_fp32(const bfloat16 *x, int64_t count) {
    static thread_local std::vector<float> kept;
    kept.resize(count);
    for (int64_t i = 0; i < count; i++) kept[i] = up(x[i]);
    return kept.data();
}

// x [rows, inputs] -> out [rows, outputs].
template <class T, int64_t P>
void linear(const T *x, const uint32_t *weights, const T *bias, T *out, int64_t rows, int64_t inputs, int64_t outputs,
            int threads) {
    const Linear<T, P> layer{weights, bias, in_fp32(x, rows * inputs), out, inputs / P, outputs};
    const int64_t blocks = (outputs + LANES - 1) / LANES, strips = (blocks + BLOCKS - 1) / BLOCKS;
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

#define PACK(NAME, Weight)                                                                                            \
    extern "C" void pack_##NAME(const Weight *weights, uint32_t *packed, int64_t inputs, int64_t outputs) {            \
        pack(weights, packed, inputs, outputs);                                                                       \
    }
#define LINEAR(NAME, T, Weight)                                                                                       \
    extern "C" void linear_##NAME(const T *x, const uint32_t *weights, const T *bias, T *out, int64_t rows,            \
                                  int64_t inputs, int64_t outputs, int threads) {                                     \
        linear<T, PER_WORD<Weight>>(x, weights, bias, out, rows, inputs, outputs, threads);                           \
    }

PACK(float32, float)
PACK(bfloat16, bfloat16)
LINEAR(float32_by_float32, float, float)
LINEAR(float32_by_bfloat16, float, bfloat16)
LINEAR(bfloat16_by_bfloat16, bfloat16, bfloat16)
