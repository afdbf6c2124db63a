// New rows of keys or values into a sequence's buffer, a thread for each word that is written.

struct Params {
    source: u32,     // word of the first element
    position: u32,   // word that has the position of the segment's first token
    first_row: u32,  // the window's first row
    to: u32,         // word of that row in the window
    stride: u32,     // words from one row of the window to the next
    width: u32,      // elements of a row
    words: u32,      // words that those take
    element: u32,    // 0: f32, 1: f16, 2: bf16
    count: u32,      // words of all rows
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<u32>;

@compute @workgroup_size(128)
fn store(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let number = (group.y * groups.x + group.x) * 128u + thread;
    if number >= p.count {
        return;
    }
    let row = number / p.words;
    let word = number % p.words;
    let to = p.to + (arena[p.position] + row - p.first_row) * p.stride + word;
    let source = p.source + row * p.width;
    if p.element == 0u {
        keep(to, arena[source + word]);
        return;
    }
    let first = arena[source + 2u * word];
    let second = arena[source + 2u * word + 1u];
    if p.element == 1u {
        keep(to, to_f16(first) | (to_f16(second) << 16u));
    } else {
        keep(to, to_bf16(first) | (to_bf16(second) << 16u));
    }
}
