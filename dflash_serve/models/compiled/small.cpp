// The small operators of a step on a CPU, each one pass over its rows: residual and norm, SwiGLU's product, and attention
// from the projected q, k, v to its output. Numbers are kept as T (float, or bfloat16 as its bits) and reckoned in fp32.
//
// A row's result depends on that row and its keys alone, in an order that never changes: not on the rows beside it, nor
// on the number of threads. So a row verified in a block comes out bit for bit as it does alone.
//
// Built by `build.py` with -ffast-math (sums are reordered once, when it is compiled). Plain C linkage, no PyTorch headers.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

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

template <class T>
float inverse_root_mean_square(const T *x, int64_t size, float eps) {
    float sum = 0;
    for (int64_t i = 0; i < size; i++) sum += up(x[i]) * up(x[i]);
    return 1 / std::sqrt(sum / size + eps);
}

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

struct Span {
    int64_t entry, start, length, row;
};

struct Shape {
    int64_t heads, kv_heads, dim, capacity;
    int64_t window;  // 0 = none
    int32_t causal;
    float eps;
};

constexpr int64_t TILE = 64;  // keys whose values stay in the first cache while all query rows read them

// x [dim], normed if there is a weight and rotated: halves (a, b) -> (a cos - b sin, b cos + a sin); sin has the sign.
template <class T>
void rotate(const T *x, const T *weight, const float *cos, const float *sin, int64_t dim, float eps, float *out) {
    float scaled[1024];
    const float scale = weight == nullptr ? 1 : inverse_root_mean_square(x, dim, eps);
    for (int64_t i = 0; i < dim; i++) scaled[i] = up(x[i]) * scale * (weight == nullptr ? 1 : up(weight[i]));
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) out[i] = scaled[i] * cos[i] + scaled[i + half] * sin[i];
    for (int64_t i = half; i < dim; i++) out[i] = scaled[i] * cos[i] + scaled[i - half] * sin[i];
}

template <int D, class T>
inline float dot(const float *q, const T *key, int64_t dim) {
    const int64_t size = D ? D : dim;
    float sum = 0;
    for (int64_t i = 0; i < size; i++) sum += q[i] * up(key[i]);
    return sum;
}

// One key head of one span: rotates and stores its keys, stores its values, and attends with its query heads.
template <int D, class T>
struct Head {
    const Shape &shape;
    const Span &span;
    const T *qkv;
    const float *cos, *sin;
    const T *q_weight, *k_weight;
    T *keys, *values;  // of the entry and key head, [capacity, dim]
    T *out;
    int64_t head;

    int64_t dim() const { return D ? D : shape.dim; }
    const T *part(int64_t row, int64_t number) const {
        return qkv + ((span.row + row) * (shape.heads + 2 * shape.kv_heads) + number) * dim();
    }

    void store() const {
        float rotated[1024];
        for (int64_t row = 0; row < span.length; row++) {
            const int64_t place = (span.start + row) * dim(), angle = (span.row + row) * dim();
            rotate(part(row, shape.heads + head), k_weight, cos + angle, sin + angle, dim(), shape.eps, rotated);
            for (int64_t i = 0; i < dim(); i++) put(keys[place + i], rotated[i]);
            const T *value = part(row, shape.heads + shape.kv_heads + head);
            std::memcpy(values + place, value, dim() * sizeof(T));
        }
    }

    // The keys [first, last) that a row sees.
    int64_t first(int64_t row) const {
        return shape.window ? std::max<int64_t>(0, span.start + row - shape.window + 1) : 0;
    }
    int64_t last(int64_t row) const {
        const int64_t place = span.start + row, end = span.start + span.length;
        if (shape.causal) return place + 1;
        return shape.window ? std::min(end, place + shape.window) : end;
    }

    void attend(std::vector<float> &scratch) const {
        const int64_t groups = shape.heads / shape.kv_heads, rows = span.length * groups;
        const int64_t end = span.start + span.length, begin = first(0), count = end - begin;
        scratch.resize(rows * (2 * dim() + count));
        float *queries = scratch.data(), *sums = queries + rows * dim(), *scores = sums + rows * dim();
        std::fill(sums, scores, 0.0f);
        const float scale = 1 / std::sqrt(float(dim()));
        for (int64_t r = 0; r < rows; r++) {  // row r: query head r % groups of the span's row r / groups
            const int64_t row = r / groups, angle = (span.row + row) * dim();
            float *query = queries + r * dim();
            rotate(part(row, head * groups + r % groups), q_weight, cos + angle, sin + angle, dim(), shape.eps, query);
            for (int64_t i = 0; i < dim(); i++) query[i] *= scale;
        }
        for (int64_t key = begin; key < end; key++)
            for (int64_t r = 0; r < rows; r++)
                scores[r * count + key - begin] = dot<D>(queries + r * dim(), keys + key * dim(), dim());
        for (int64_t r = 0; r < rows; r++) softmax(scores + r * count - begin, first(r / groups), last(r / groups));
        for (int64_t from = begin; from < end; from += TILE)
            for (int64_t r = 0; r < rows; r++) {
                const int64_t row = r / groups;
                const int64_t low = std::max(from, first(row)), high = std::min(from + TILE, last(row));
                add_values(scores + r * count - begin, low, high, sums + r * dim());
            }
        for (int64_t r = 0; r < rows; r++) {
            T *place = out + ((span.row + r / groups) * shape.heads + head * groups + r % groups) * dim();
            for (int64_t i = 0; i < dim(); i++) put(place[i], sums[r * dim() + i]);
        }
    }

    static void softmax(float *scores, int64_t low, int64_t high) {
        float most = scores[low], sum = 0;
        for (int64_t key = low; key < high; key++) most = std::max(most, scores[key]);
        for (int64_t key = low; key < high; key++) {
            scores[key] = std::exp(scores[key] - most);
            sum += scores[key];
        }
        const float scale = 1 / sum;
        for (int64_t key = low; key < high; key++) scores[key] *= scale;
    }

    void add_values(const float *weights, int64_t low, int64_t high, float *sums) const {
        float kept[D ? D : 1024];  // in registers, where D is known
        std::memcpy(kept, sums, dim() * sizeof(float));
        for (int64_t key = low; key < high; key++) {
            const T *value = values + key * dim();
            for (int64_t i = 0; i < dim(); i++) kept[i] += weights[key] * up(value[i]);
        }
        std::memcpy(sums, kept, dim() * sizeof(float));
    }
};

// qkv [rows, heads + 2 kv_heads, dim] of all spans after one another -> out [rows, heads, dim].
// keys and values: one layer of a K/V cache, [entries, kv_heads, capacity, dim]; cos and sin [rows, dim].
template <int D, class T>
void attend(const T *qkv, const float *cos, const float *sin, const T *q_weight, const T *k_weight, T *keys, T *values,
            const Span *spans, int64_t count, T *out, const Shape &shape, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t task = 0; task < count * shape.kv_heads; task++) {
        static thread_local std::vector<float> scratch;
        const Span &span = spans[task / shape.kv_heads];
        const int64_t head = task % shape.kv_heads;
        const int64_t place = (span.entry * shape.kv_heads + head) * shape.capacity * shape.dim;
        const Head<D, T> work{shape, span, qkv, cos, sin, q_weight, k_weight, keys + place, values + place, out, head};
        work.store();
        work.attend(scratch);
    }
}

template <class T>
void attend_any(const T *qkv, const float *cos, const float *sin, const T *q_weight, const T *k_weight, T *keys,
                T *values, const Span *spans, int64_t count, T *out, const Shape &shape, int threads) {
    auto *chosen = shape.dim == 64 ? attend<64, T> : shape.dim == 128 ? attend<128, T> : attend<0, T>;
    chosen(qkv, cos, sin, q_weight, k_weight, keys, values, spans, count, out, shape, threads);
}

}  // namespace

#define KERNELS(NAME, T)                                                                                              \
    extern "C" void add_norm_##NAME(T *h, const T *x, const T *weight, T *out, int64_t rows, int64_t size, float eps,  \
                                    int threads) {                                                                    \
        add_norm(h, x, weight, out, rows, size, eps, threads);                                                        \
    }                                                                                                                 \
    extern "C" void silu_product_##NAME(const T *gate_up, T *out, int64_t rows, int64_t size, int threads) {           \
        silu_product(gate_up, out, rows, size, threads);                                                              \
    }                                                                                                                 \
    extern "C" void attend_##NAME(const T *qkv, const float *cos, const float *sin, const T *q_weight,                 \
                                  const T *k_weight, T *keys, T *values, const Span *spans, int64_t count, T *out,     \
                                  const Shape *shape, int threads) {                                                  \
        attend_any(qkv, cos, sin, q_weight, k_weight, keys, values, spans, count, out, *shape, threads);               \
    }

KERNELS(float32, float)
KERNELS(bfloat16, bfloat16)
