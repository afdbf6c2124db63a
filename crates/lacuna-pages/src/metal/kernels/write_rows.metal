// language: metal3.0
#include <metal_stdlib>
#include <simd/simd.h>

using metal::uint;

struct _mslBufferSizes {
    uint size1;
    uint size2;
};

struct Rows {
    uint first;
    uint row;
    uint stride;
    uint words;
};
typedef uint type_1[1];

struct write_rowsInput {
};
[[max_total_threads_per_threadgroup(128)]] kernel void write_rows(
  metal::uint3 thread_ [[thread_position_in_grid]]
, constant Rows& rows [[buffer(2)]]
, device type_1& destination [[buffer(0)]]
, device type_1 const& source [[buffer(1)]]
, constant _mslBufferSizes& _buffer_sizes [[buffer(3)]]
) {
    uint word = thread_.x;
    uint _e4 = rows.words;
    if (word >= _e4) {
        return;
    }
    uint _e8 = rows.row;
    uint row = word / _e8;
    uint _e13 = rows.first;
    uint _e16 = rows.stride;
    uint _e21 = rows.row;
    uint _e27 = source[word];
    destination[(_e13 + (row * _e16)) + (word % _e21)] = _e27;
    return;
}
