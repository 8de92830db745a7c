// Attention of a step on a CPU, from the projected q, k, v to its output: norms, rotation, K/V writes, and the rows' own
// block. Numbers are kept as T (float, or bfloat16 as its bits) and reckoned in fp32.
//
// Keys are taken CHUNK at a time, wherever a context begins and ends; what each chunk comes to is put together in order.
// A row's result depends on that row and its keys alone, in an order that never changes: not on the rows beside it, nor
// on the number of threads. So a row verified in a block comes out bit for bit as it does alone.
//
// Built by `build.py` with -ffast-math (sums are reordered once, when it is compiled). Plain C linkage, no PyTorch headers.

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

#if defined(__AVX512F__)
constexpr int VECTORS = 2, SCORE_ROWS = 8, VALUE_VECTORS = 16;  // of tiles whose sums stay in registers
#elif defined(__AVX__)
constexpr int VECTORS = 2, SCORE_ROWS = 4, VALUE_VECTORS = 8;
#else
constexpr int VECTORS = 2, SCORE_ROWS = 4, VALUE_VECTORS = 16;
#endif
constexpr int64_t MOST_DIM = 1024;  // of a head
constexpr int64_t CHUNK = 512;  // keys that one thread attends to: of a longer context each thread takes some
constexpr int64_t NEAR = 64;  // keys whose values stay in the first cache while all query rows read them
constexpr float UNSEEN = -1e30f;

struct Span {
    int64_t entry, start, length, row;
};

struct Shape {
    int64_t heads, kv_heads, dim, capacity;
    int64_t window;  // 0 = none
    int32_t causal;
    float eps;
};

// x [dim], normed if there is a weight and rotated: halves (a, b) -> (a cos - b sin, b cos + a sin); sin has the sign.
template <class T>
void rotate(const T *x, const T *weight, const float *cos, const float *sin, int64_t dim, float eps, float *out) {
    float scaled[MOST_DIM];
    const float scale = weight == nullptr ? 1 : inverse_root_mean_square(x, dim, eps);
    for (int64_t i = 0; i < dim; i++) scaled[i] = up(x[i]) * scale * (weight == nullptr ? 1 : up(weight[i]));
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) out[i] = scaled[i] * cos[i] + scaled[i + half] * sin[i];
    for (int64_t i = half; i < dim; i++) out[i] = scaled[i] * cos[i] + scaled[i - half] * sin[i];
}

// Calls work.run<R>(row) for all rows, R = MOST at a time and once fewer.
template <int MOST, class Work>
void in_strips(int64_t rows, const Work &work) {
    int64_t row = 0;
    for (; row + MOST <= rows; row += MOST) work.template run<MOST>(row);
    switch (rows - row) {
        case 1: return work.template run<1>(row);
        case 2: return work.template run<2>(row);
        case 3: return work.template run<3>(row);
        case 4: return work.template run<4>(row);
        case 5: return work.template run<5>(row);
        case 6: return work.template run<6>(row);
        case 7: return work.template run<7>(row);
    }
}

// Queries [rows, dim] times keys, which lie side by side [dim, LANES] a vector: scores [rows, CHUNK].
template <int D>
struct Scores {
    const float *queries;
    const Floats *keys;  // [VECTORS, dim]
    float *scores;
    int64_t size;

    template <int R>
    void run(int64_t row) const {
        const int64_t dim = D ? D : size;
        Floats sums[R][VECTORS] = {};
        for (int64_t i = 0; i < dim; i++)
            for (int r = 0; r < R; r++)
                for (int n = 0; n < VECTORS; n++) sums[r][n] += queries[(row + r) * dim + i] * keys[n * dim + i];
        for (int r = 0; r < R; r++) std::memcpy(scores + (row + r) * CHUNK, sums[r], sizeof sums[r]);
    }
};

// Adds `count` values [count, dim], weighted by weights [rows, CHUNK], to sums [rows, vectors of dim].
template <int D, class T>
struct Values {
    static constexpr int ROWS = D ? std::clamp<int>(VALUE_VECTORS / (D / LANES), 1, 8) : 1;
    const float *weights;
    const T *values;
    Floats *sums;
    int64_t count, size;

    template <int R>
    void run(int64_t row) const {
        const int64_t dim = D ? D : size, vectors = (dim + LANES - 1) / LANES;
        Floats kept[R][(D ? D : MOST_DIM) / LANES];
        for (int r = 0; r < R; r++)
            for (int64_t n = 0; n < vectors; n++) kept[r][n] = sums[(row + r) * vectors + n];
        for (int64_t key = 0; key < count; key++)
            for (int64_t n = 0; n < vectors; n++) {
                const Floats value = load(values + key * dim + n * LANES, D ? LANES : dim - n * LANES);
                for (int r = 0; r < R; r++) kept[r][n] += weights[(row + r) * CHUNK + key] * value;
            }
        for (int r = 0; r < R; r++)
            for (int64_t n = 0; n < vectors; n++) sums[(row + r) * vectors + n] = kept[r][n];
    }
};

// What a row has of the keys of one chunk: its values' sum, weighted by exp(score - most), the sum of the weights, and
// the largest score; the weights' sum is 0 where the row sees none of them.
struct Part {
    const float *sum;
    float total, most;
};

// One chunk of the keys of one key head of one span: those of the span's own rows are rotated and stored with their
// values, and the head's query rows attend to all of them.
template <int D, class T>
struct Task {
    const Shape &shape;
    const Span &span;
    const T *qkv;
    const float *cos, *sin;
    const T *q_weight, *k_weight;
    T *keys, *values;  // of the entry and key head, [capacity, dim]
    int64_t head, begin, end;

    int64_t dim() const { return D ? D : shape.dim; }
    int64_t vectors() const { return (dim() + LANES - 1) / LANES; }
    int64_t groups() const { return shape.heads / shape.kv_heads; }
    // Query rows: r is query head r % groups of the span's row r / groups.
    int64_t rows() const { return span.length * groups(); }
    const T *part(int64_t row, int64_t number) const {
        return qkv + ((span.row + row) * (shape.heads + 2 * shape.kv_heads) + number) * dim();
    }

    void store() const {
        float rotated[MOST_DIM];
        for (int64_t place = std::max(begin, span.start); place < end; place++) {
            const int64_t row = place - span.start, angle = (span.row + row) * dim();
            rotate(part(row, shape.heads + head), k_weight, cos + angle, sin + angle, dim(), shape.eps, rotated);
            for (int64_t i = 0; i < dim(); i++) put(keys[place * dim() + i], rotated[i]);
            const T *value = part(row, shape.heads + shape.kv_heads + head);
            std::memcpy(values + place * dim(), value, dim() * sizeof(T));
        }
    }

    // The keys [first, last) of the chunk that a row sees, counted from its first.
    int64_t first(int64_t row) const {
        const int64_t low = shape.window ? span.start + row - shape.window + 1 : 0;
        return std::clamp<int64_t>(low - begin, 0, end - begin);
    }
    int64_t last(int64_t row) const {
        const int64_t place = span.start + row;
        const int64_t high = shape.causal ? place + 1 : shape.window ? place + shape.window : end;
        return std::clamp<int64_t>(high - begin, 0, end - begin);
    }

    // Numbers that `attend` needs: queries [rows, dim], scores [rows, CHUNK], keys side by side.
    int64_t scratch() const { return rows() * (dim() + CHUNK) + VECTORS * LANES * dim(); }

    // Fills sums [rows, vectors * LANES] and each row's part.
    void attend(float *scratch, float *sums, Part *parts) const {
        float *side_by_side = scratch, *queries = side_by_side + VECTORS * LANES * dim();
        float *scores = queries + rows() * dim();
        const float scale = 1 / std::sqrt(float(dim()));
        for (int64_t r = 0; r < rows(); r++) {
            const int64_t row = r / groups(), angle = (span.row + row) * dim();
            float *query = queries + r * dim();
            const T *projected = part(row, head * groups() + r % groups());
            rotate(projected, q_weight, cos + angle, sin + angle, dim(), shape.eps, query);
            for (int64_t i = 0; i < dim(); i++) query[i] *= scale;
        }
        Floats *tile = reinterpret_cast<Floats *>(side_by_side), *own = reinterpret_cast<Floats *>(sums);
        for (int64_t from = 0; from < end - begin; from += VECTORS * LANES) {
            for (int64_t n = 0; n < VECTORS; n++) {
                const int64_t key = begin + from + n * LANES;
                transpose(keys + key * dim(), end - key, dim(), tile + n * dim());
            }
            in_strips<SCORE_ROWS>(rows(), Scores<D>{queries, tile, scores + from, dim()});
        }
        for (int64_t r = 0; r < rows(); r++)
            parts[r] = weigh(scores + r * CHUNK, first(r / groups()), last(r / groups()));
        std::fill(sums, sums + rows() * vectors() * LANES, 0.0f);
        for (int64_t from = first(0); from < end - begin; from += NEAR) {
            const int64_t count = std::min(NEAR, end - begin - from);
            const Values<D, T> some{scores + from, values + (begin + from) * dim(), own, count, dim()};
            in_strips<Values<D, T>::ROWS>(rows(), some);
        }
        for (int64_t r = 0; r < rows(); r++) parts[r].sum = sums + r * vectors() * LANES;
    }

    // Scores to weights, 0 where a row does not look.
    Part weigh(float *scores, int64_t low, int64_t high) const {
        const int64_t count = (end - begin + LANES - 1) / LANES * LANES;
        std::fill(scores, scores + low, UNSEEN);
        std::fill(scores + high, scores + count, UNSEEN);
        float most = UNSEEN, total = 0;
        for (int64_t key = 0; key < count; key++) most = std::max(most, scores[key]);
        if (low >= high) std::fill(scores, scores + count, 0.0f);
        if (low >= high) return {nullptr, 0, most};
        for (int64_t key = 0; key < count; key++) {
            scores[key] = std::exp(scores[key] - most);
            total += scores[key];
        }
        return {nullptr, total, most};
    }
};

// A row's output [dim] from its parts, `stride` apart.
template <class T>
void finish(const Part *parts, int64_t stride, int64_t count, int64_t dim, T *out) {
    float most = UNSEEN, total = 0, sum[MOST_DIM] = {};
    for (int64_t c = 0; c < count; c++)
        if (parts[c * stride].total > 0) most = std::max(most, parts[c * stride].most);
    for (int64_t c = 0; c < count; c++) {
        const Part &part = parts[c * stride];
        if (part.total == 0) continue;
        const float weight = std::exp(part.most - most);
        total += weight * part.total;
        for (int64_t i = 0; i < dim; i++) sum[i] += weight * part.sum[i];
    }
    const float scale = 1 / total;
    for (int64_t i = 0; i < dim; i++) put(out[i], sum[i] * scale);
}

// qkv [rows, heads + 2 kv_heads, dim] of all spans after one another -> out [rows, heads, dim].
// keys and values: one layer of a K/V cache, [entries, kv_heads, capacity, dim]; cos and sin [rows, dim].
template <int D, class T>
void attend(const T *qkv, const float *cos, const float *sin, const T *q_weight, const T *k_weight, T *keys, T *values,
            const Span *spans, int64_t count, T *out, const Shape &shape, int threads) {
    const int64_t dim = D ? D : shape.dim, padded = (dim + LANES - 1) / LANES * LANES;
    const int64_t groups = shape.heads / shape.kv_heads;
    std::vector<Task<D, T>> tasks;
    std::vector<int64_t> places, firsts;  // of tasks' parts, and of the first task of each span's key heads
    int64_t rows = 0, scratch = 0;
    for (int64_t n = 0; n < count; n++)
        for (int64_t head = 0; head < shape.kv_heads; head++) {
            const Span &span = spans[n];
            const int64_t place = (span.entry * shape.kv_heads + head) * shape.capacity * dim;
            const int64_t end = span.start + span.length;
            const int64_t seen = shape.window ? std::max<int64_t>(0, span.start - shape.window + 1) : 0;
            firsts.push_back(tasks.size());
            for (int64_t from = seen / CHUNK * CHUNK; from < end; from += CHUNK) {
                const int64_t to = std::min(end, from + CHUNK);
                tasks.push_back(
                    {shape, span, qkv, cos, sin, q_weight, k_weight, keys + place, values + place, head, from, to});
                places.push_back(rows);
                rows += tasks.back().rows();
                scratch = std::max(scratch, tasks.back().scratch());
            }
        }
    firsts.push_back(tasks.size());
    std::vector<Part> parts(rows);
    Aligned sums(rows * padded);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Aligned own(scratch);
#pragma omp for schedule(dynamic)
        for (int64_t n = 0; n < firsts.back(); n++) {
            tasks[n].store();
            tasks[n].attend(own.data, sums.data + places[n] * padded, parts.data() + places[n]);
        }
#pragma omp for
        for (int64_t n = 0; n < count * shape.kv_heads; n++) {
            const Task<D, T> &task = tasks[firsts[n]];
            for (int64_t r = 0; r < task.rows(); r++) {
                T *place = out + ((task.span.row + r / groups) * shape.heads + task.head * groups + r % groups) * dim;
                finish(parts.data() + places[firsts[n]] + r, task.rows(), firsts[n + 1] - firsts[n], dim, place);
            }
        }
    }
}

template <class T>
void attend_any(const T *qkv, const float *cos, const float *sin, const T *q_weight, const T *k_weight, T *keys,
                T *values, const Span *spans, int64_t count, T *out, const Shape &shape, int threads) {
    auto *chosen = shape.dim == 64 ? attend<64, T> : shape.dim == 128 ? attend<128, T> : attend<0, T>;
    chosen(qkv, cos, sin, q_weight, k_weight, keys, values, spans, count, out, shape, threads);
}

}  // namespace

#define ATTEND(NAME, T)                                                                                               \
    extern "C" void attend_##NAME(const T *qkv, const float *cos, const float *sin, const T *q_weight,                 \
                                  const T *k_weight, T *keys, T *values, const Span *spans, int64_t count, T *out,     \
                                  const Shape *shape, int threads) {                                                  \
        attend_any(qkv, cos, sin, q_weight, k_weight, keys, values, spans, count, out, *shape, threads);               \
    }

ATTEND(float32, float)
ATTEND(bfloat16, bfloat16)
