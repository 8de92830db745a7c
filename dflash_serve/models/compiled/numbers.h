// Numbers as they are kept, float or bfloat16, and as they are reckoned with: float.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

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

}  // namespace
