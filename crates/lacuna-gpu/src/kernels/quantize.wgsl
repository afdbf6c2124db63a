// Rows as signed bytes, for products with quantized matrices: of each block of 32 elements eight words of
// four, what one unit is worth (max |x| / 127), and the sum of the bytes. A thread for each block. The same
// numbers as the processor's.

struct Params {
    source: u32,    // word of the first element
    bytes: u32,   // where the bytes go, in words
    scales: u32,
    sums: u32,
    blocks: u32,  // of all rows
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<u32>;

// Below this a block counts as zero; its reciprocal would overflow.
const SMALLEST = 1e-35;

@compute @workgroup_size(128)
fn quantize(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let block = (group.y * groups.x + group.x) * 128u + thread;
    if block >= p.blocks {
        return;
    }
    let source = p.source + block * 32u;
    // The magnitudes of floats are in the order of their bits; those that are not finite are the largest.
    var largest = 0u;
    for (var i = 0u; i < 32u; i++) {
        largest = max(largest, arena[source + i] & 0x7fffffffu);
    }
    let most = bitcast<f32>(largest);
    var scale = 0.0;
    var inverse = 0.0;
    if largest >= bitcast<u32>(SMALLEST) {
        scale = most / 127.0;
        inverse = 127.0 / most;
    }
    var sum = 0;
    for (var word = 0u; word < 8u; word++) {
        var packed = 0u;
        for (var byte = 0u; byte < 4u; byte++) {
            let x = bitcast<f32>(arena[source + word * 4u + byte]);
            let q = i32(round(x * inverse));
            sum += q;
            packed |= (bitcast<u32>(q) & 0xffu) << (8u * byte);
        }
        arena[p.bytes + block * 8u + word] = packed;
    }
    arena[p.scales + block] = bitcast<u32>(scale);
    arena[p.sums + block] = bitcast<u32>(sum);
}
