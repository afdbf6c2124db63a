// language: metal3.0
#include <metal_stdlib>
#include <simd/simd.h>

using metal::uint;

struct _mslBufferSizes {
    uint size1;
    uint size2;
};

struct Part {
    uint first;
    uint words;
    uint base;
};
typedef uint type_1[1];
struct type_2 {
    uint inner[128];
};

struct checksumInput {
};
[[max_total_threads_per_threadgroup(128)]] kernel void checksum(
  metal::uint3 thread_ [[thread_position_in_grid]]
, metal::uint3 groups [[threadgroups_per_grid]]
, metal::uint3 group [[threadgroup_position_in_grid]]
, uint lane [[thread_index_in_threadgroup]]
, constant Part& part [[buffer(2)]]
, device type_1 const& memory [[buffer(0)]]
, device type_1& partials [[buffer(1)]]
, threadgroup type_2& sums
, constant _mslBufferSizes& _buffer_sizes [[buffer(3)]]
) {
    uint sum = 0u;
    uint word = {};
    uint half_ = 64u;
    word = thread_.x;
    bool loop_init = true;
    while(true) {
        if (!loop_init) {
            uint _e33 = word;
            word = _e33 + (groups.x * 128u);
        }
        loop_init = false;
        uint _e8 = word;
        uint _e11 = part.words;
        if (_e8 < _e11) {
        } else {
            break;
        }
        {
            uint _e13 = sum;
            uint _e17 = part.first;
            uint _e18 = word;
            uint _e21 = memory[_e17 + _e18];
            uint _e25 = part.base;
            uint _e26 = word;
            sum = _e13 + (_e21 * ((2u * (_e25 + _e26)) + 1u));
        }
    }
    uint _e40 = sum;
    sums.inner[lane] = _e40;
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    bool loop_init_1 = true;
    while(true) {
        if (!loop_init_1) {
            uint _e57 = half_;
            half_ = _e57 / 2u;
        }
        loop_init_1 = false;
        uint _e43 = half_;
        if (_e43 > 0u) {
        } else {
            break;
        }
        {
            uint _e46 = half_;
            if (lane < _e46) {
                uint _e50 = sums.inner[lane];
                uint _e52 = half_;
                uint _e55 = sums.inner[lane + _e52];
                sums.inner[lane] = _e50 + _e55;
            }
            metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
        }
    }
    if (lane == 0u) {
        uint _e67 = sums.inner[0];
        partials[group.x] = _e67;
        return;
    } else {
        return;
    }
}
