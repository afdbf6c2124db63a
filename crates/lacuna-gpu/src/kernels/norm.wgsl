// Norms: a workgroup for each group of elements, of which the mean is taken off if that is asked for, and which are
// divided by the root of their mean square then. Sums are made in an order that only
// the width decides: each thread its share, then halves of a tree, whatever a subgroup is.

struct Params {
    source: u32,     // word of the first element that is read
    to: u32,       // word of the first that is written; may be the same
    width: u32,    // elements of a group
    groups: u32,   // groups of a row
    weight: u32,   // where the weights begin in `vectors`, or NONE
    epsilon: f32,
    centered: u32,  // 1: the mean is taken off
    bias: u32,      // where what is added to normed elements begins, or NONE
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<f32>;
@group(0) @binding(1) var<storage, read> vectors: array<f32>;

const THREADS = 128u;
const NONE = 0xffffffffu;

@compute @workgroup_size(THREADS)
fn norm(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let start = (group.y * p.groups + group.x) * p.width;
    var mean = 0.0;
    if p.centered == 1u {
        var sum = 0.0;
        for (var i = thread; i < p.width; i += THREADS) {
            sum += arena[p.source + start + i];
        }
        mean = together(thread, sum) / f32(p.width);
    }
    var sum = 0.0;
    for (var i = thread; i < p.width; i += THREADS) {
        let x = arena[p.source + start + i] - mean;
        sum += x * x;
    }
    let scale = 1.0 / sqrt(together(thread, sum) / f32(p.width) + p.epsilon);
    for (var i = thread; i < p.width; i += THREADS) {
        var y = (arena[p.source + start + i] - mean) * scale;
        if p.weight != NONE {
            y *= vectors[p.weight + i];
        }
        if p.bias != NONE {
            y += vectors[p.bias + i];
        }
        arena[p.to + start + i] = y;
    }
}
