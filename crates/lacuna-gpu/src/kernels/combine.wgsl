// The weighed sum of what each token's experts have made of it, the best first: a thread for each element.

struct Params {
    source: u32,   // word of the first choice's row
    to: u32,       // word of the first token's
    weights: u32,  // word of the first token's
    used: u32,     // choices of a token
    width: u32,
    count: u32,    // elements of all tokens
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<f32>;

const THREADS = 128u;

@compute @workgroup_size(THREADS)
fn combine(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let number = (group.y * groups.x + group.x) * THREADS + thread;
    if number >= p.count {
        return;
    }
    let token = number / p.width;
    let element = number % p.width;
    let first = p.source + token * p.used * p.width + element;
    var sum = 0.0;
    for (var i = 0u; i < p.used; i++) {
        sum = fma(arena[p.weights + token * p.used + i], arena[first + i * p.width], sum);
    }
    arena[p.to + number] = sum;
}
