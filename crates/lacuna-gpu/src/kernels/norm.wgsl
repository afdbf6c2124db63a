// Root mean square norms: a workgroup for each group of elements. Sums are made in an order that only
// the width decides: each thread its share, then halves of a tree, whatever a subgroup is.

struct Params {
    source: u32,     // word of the first element that is read
    to: u32,       // word of the first that is written; may be the same
    width: u32,    // elements of a group
    groups: u32,   // groups of a row
    weight: u32,   // where the weights begin in `vectors`, or NONE
    epsilon: f32,
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<f32>;
@group(0) @binding(1) var<storage, read> vectors: array<f32>;

const THREADS = 128u;
const NONE = 0xffffffffu;

var<workgroup> sums: array<f32, THREADS>;

@compute @workgroup_size(THREADS)
fn norm(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let start = (group.y * p.groups + group.x) * p.width;
    var sum = 0.0;
    for (var i = thread; i < p.width; i += THREADS) {
        let x = arena[p.source + start + i];
        sum += x * x;
    }
    sums[thread] = sum;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if thread < half {
            sums[thread] += sums[thread + half];
        }
        workgroupBarrier();
    }
    let scale = 1.0 / sqrt(sums[0] / f32(p.width) + p.epsilon);
    for (var i = thread; i < p.width; i += THREADS) {
        var y = arena[p.source + start + i] * scale;
        if p.weight != NONE {
            y *= vectors[p.weight + i];
        }
        arena[p.to + start + i] = y;
    }
}
