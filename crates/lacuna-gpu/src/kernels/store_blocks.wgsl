// New rows of keys or values into a sequence's buffer as blocks of 32 bytes behind what one is worth, a float of 16 bits: a
// thread for every two blocks, which are 17 words.

struct Params {
    source: u32,     // word of the first element
    position: u32,   // word that has the position of the segment's first token
    first_row: u32,  // the window's first row
    to: u32,         // word of that row in the window
    stride: u32,     // words from one row of the window to the next
    width: u32,      // elements of a row
    count: u32,      // pairs of blocks of all rows
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<f32>;

const THREADS = 128u;

// The largest magnitude of a block, by its bits: those that are not finite are the largest.
fn largest_of(first: u32) -> f32 {
    var largest = 0u;
    for (var i = 0u; i < 32u; i++) {
        largest = max(largest, bitcast<u32>(arena[first + i]) & 0x7fffffffu);
    }
    return bitcast<f32>(largest);
}

// Four bytes of a block.
fn four(at: u32, inverse: f32) -> u32 {
    let x = vec4<f32>(arena[at], arena[at + 1u], arena[at + 2u], arena[at + 3u]);
    let bytes = bitcast<vec4<u32>>(vec4<i32>(round(x * inverse))) & vec4<u32>(0xffu);
    return bytes.x | (bytes.y << 8u) | (bytes.z << 16u) | (bytes.w << 24u);
}

@compute @workgroup_size(THREADS)
fn store_blocks(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let number = (group.y * groups.x + group.x) * THREADS + thread;
    if number >= p.count {
        return;
    }
    let pairs = p.width / 64u;
    let row = bitcast<u32>(arena[p.position]) + number / pairs - p.first_row;
    let to = p.to + row * p.stride + number % pairs * 17u;
    let source = p.source + number * 64u;
    let first = unit_of(largest_of(source));
    let second = unit_of(largest_of(source + 32u));
    var word = to_f16(bitcast<u32>(first.x));
    for (var i = 0u; i < 8u; i++) {
        let bytes = four(source + 4u * i, first.y);
        keep(to + i, word | (bytes << 16u));
        word = bytes >> 16u;
    }
    keep(to + 8u, word | (to_f16(bitcast<u32>(second.x)) << 16u));
    for (var i = 0u; i < 8u; i++) {
        keep(to + 9u + i, four(source + 32u + 4u * i, second.y));
    }
}
