// The small operators of a step on a CPU, each one pass over its rows: residual and norm, and SwiGLU's product. Numbers are
// kept as T (float, or bfloat16 as its bits) and reckoned in fp32.
//
// A row's result depends on that row alone, in an order that never changes: not on the rows beside it, nor on the number
// of threads. So a row verified in a block comes out bit for bit as it does alone.
//
// Built by `build.py` with -ffast-math (sums are reordered once, when it is compiled). Plain C linkage, no PyTorch headers.

#include "numbers.h"

namespace {

// h += x, unless x is null; out = norm(h) * weight. All [rows, size].
template <class T>
void add_norm(T *h, const T *x, const T *weight, T *out, int64_t rows, int64_t size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        T *mine = h + row * size, *normed = out + row * size;
        if (x != nullptr)
            for (int64_t i = 0; i < size; i++) put(mine[i], up(mine[i]) + up(x[row * size + i]));
        const float scale = inverse_root_mean_square(mine, size, eps);
        for (int64_t i = 0; i < size; i++) put(normed[i], up(mine[i]) * scale * up(weight[i]));
    }
}

// out [rows, size] = silu(gate) * up_, of [rows, 2 * size] with the gate first.
template <class T>
void silu_product(const T *gate_up, T *out, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const T *gate = gate_up + row * 2 * size, *other = gate + size;
        for (int64_t i = 0; i < size; i++) {
            const float g = up(gate[i]);
            put(out[row * size + i], g / (1 + std::exp(-g)) * up(other[i]));
        }
    }
}

}  // namespace

#define KERNELS(NAME, T)                                                                                              \
    extern "C" void add_norm_##NAME(T *h, const T *x, const T *weight, T *out, int64_t rows, int64_t size, float eps,  \
                                    int threads) {                                                                    \
        add_norm(h, x, weight, out, rows, size, eps, threads);                                                        \
    }                                                                                                                 \
    extern "C" void silu_product_##NAME(const T *gate_up, T *out, int64_t rows, int64_t size, int threads) {           \
        silu_product(gate_up, out, rows, size, threads);                                                              \
    }

KERNELS(float32, float)
KERNELS(bfloat16, bfloat16)
