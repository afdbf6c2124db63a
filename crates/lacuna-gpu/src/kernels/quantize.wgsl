// Rows for products with quantized matrices, as they are or the products of a gate: a thread for every four
// elements. `bytes.wgsl` says what is made of them.

struct Params {
    source: u32,    // word of the first element
    up: u32,        // word of the first element of what f(source) is multiplied with, or NONE
    function: u32,  // which activation
    bytes: u32,     // where the bytes go, in words
    scales: u32,
    sums: u32,
    fours: u32,     // fours of elements of all rows
    alpha: f32,     // of a gate that is clamped
    limit: f32,
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<vec4<u32>>;

const THREADS = 128u;
const NONE = 0xffffffffu;

fn put(word: u32, value: u32) {
    arena[word / 4u][word % 4u] = value;
}

@compute @workgroup_size(THREADS)
fn quantize(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let number = (group.y * groups.x + group.x) * THREADS + thread;
    let within = number < p.fours;
    var x = vec4<f32>();
    if within {
        x = bitcast<vec4<f32>>(arena[p.source / 4u + number]);
        if p.up != NONE {
            let up = bitcast<vec4<f32>>(arena[p.up / 4u + number]);
            x = vec4<f32>(gated(x.x, up.x), gated(x.y, up.y), gated(x.z, up.z), gated(x.w, up.w));
        }
    }
    quantize_four(thread, x, number, within);
}
