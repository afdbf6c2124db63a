// Elements as signed bytes, for products with quantized matrices: of each block of 32 elements eight words of
// four, what one unit is worth (max |x| / 127), and the sum of the bytes. The same numbers as the processor's.
//
// Put behind `unit.wgsl` and a kernel that has `THREADS`, `p.bytes`, `p.scales`, `p.sums` and `put`, which writes a word.

var<workgroup> largest_of: array<u32, THREADS>;
var<workgroup> sum_of: array<i32, THREADS>;

// Eight threads beside each other have a block, each four elements: those of this number among all rows, unless
// they are beyond the last. All threads of a workgroup come here together.
fn quantize_four(thread: u32, x: vec4<f32>, number: u32, within: bool) {
    // The magnitudes of floats are in the order of their bits; those that are not finite are the largest.
    let magnitudes = bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu);
    largest_of[thread] = max(max(magnitudes.x, magnitudes.y), max(magnitudes.z, magnitudes.w));
    workgroupBarrier();
    let first = thread / 8u * 8u;
    var largest = 0u;
    for (var i = 0u; i < 8u; i++) {
        largest = max(largest, largest_of[first + i]);
    }
    let unit = unit_of(bitcast<f32>(largest));
    let q = vec4<i32>(round(x * unit.y));
    sum_of[thread] = q.x + q.y + q.z + q.w;
    workgroupBarrier();
    if !within {
        return;
    }
    let bytes = bitcast<vec4<u32>>(q) & vec4<u32>(0xffu);
    put(p.bytes + number, bytes.x | (bytes.y << 8u) | (bytes.z << 16u) | (bytes.w << 24u));
    if thread == first {
        var sum = 0;
        for (var i = 0u; i < 8u; i++) {
            sum += sum_of[first + i];
        }
        put(p.scales + number / 8u, bitcast<u32>(unit.x));
        put(p.sums + number / 8u, bitcast<u32>(sum));
    }
}
