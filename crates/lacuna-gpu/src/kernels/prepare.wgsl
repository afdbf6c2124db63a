// What comes between two products, a workgroup for each row: rows are added to a row, which is normed and
// quantized, as far as each of these is asked for. Sums are made in an order that only the width decides: each
// thread its share, then halves of a tree, whatever a subgroup is.

struct Params {
    source: u32,         // word of the first row
    add: u32,            // word of the first of the rows that are added to those, or NONE
    factor: f32,         // what these are multiplied by
    inner: u32,          // where the weights of their own norm begin in `vectors`, or NONE: they have none
    inner_epsilon: f32,
    to: u32,             // word of the first row that is written, or NONE
    width: u32,
    weight: u32,         // where the weights begin in `vectors`, or NONE
    epsilon: f32,
    bytes: u32,          // where bytes go, in words, or NONE
    scales: u32,
    sums: u32,
    centered: u32,       // norms that take the mean off: 1: that of all, 2: that of what is added
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> vectors: array<f32>;

const THREADS = 256u;
const NONE = 0xffffffffu;

fn put(word: u32, value: u32) {
    arena[word / 4u][word % 4u] = value;
}

fn four(at: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(arena[at]);
}

fn weights(at: u32) -> vec4<f32> {
    return vec4<f32>(vectors[at], vectors[at + 1u], vectors[at + 2u], vectors[at + 3u]);
}

// A sum of squares that goes on.
fn squares(sum: f32, x: vec4<f32>) -> f32 {
    return fma(x.w, x.w, fma(x.z, x.z, fma(x.y, x.y, fma(x.x, x.x, sum))));
}

fn all_of(x: vec4<f32>) -> f32 {
    return ((x.x + x.y) + x.z) + x.w;
}

// What each element of a row is multiplied by.
fn scale_of(thread: u32, sum: f32, epsilon: f32) -> f32 {
    return 1.0 / sqrt(together(thread, sum) / f32(p.width) + epsilon);
}

@compute @workgroup_size(THREADS)
fn prepare(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let fours = p.width / 4u;
    let start = group.x * fours;
    let source = p.source / 4u + start;
    let add = p.add / 4u + start;
    var inner = 1.0;
    var inner_mean = 0.0;
    if p.inner != NONE {
        if (p.centered & 2u) != 0u {
            var sum = 0.0;
            for (var i = thread; i < fours; i += THREADS) {
                sum += all_of(four(add + i));
            }
            inner_mean = together(thread, sum) / f32(p.width);
        }
        var sum = 0.0;
        for (var i = thread; i < fours; i += THREADS) {
            sum = squares(sum, four(add + i) - inner_mean);
        }
        inner = scale_of(thread, sum, p.inner_epsilon);
    }
    let centered = (p.centered & 1u) != 0u;
    var sum = 0.0;
    for (var i = thread; i < fours; i += THREADS) {
        var x = four(source + i);
        if p.add != NONE {
            var more = four(add + i);
            if p.inner != NONE {
                more = (more - inner_mean) * inner * weights(p.inner + 4u * i);
            }
            x = fma(vec4<f32>(p.factor), more, x);
            arena[source + i] = bitcast<vec4<u32>>(x);
        }
        sum = select(squares(sum, x), sum + all_of(x), centered);
    }
    var mean = 0.0;
    if centered {
        mean = together(thread, sum) / f32(p.width);
        sum = 0.0;
        for (var i = thread; i < fours; i += THREADS) {
            // What this thread itself has written.
            sum = squares(sum, four(source + i) - mean);
        }
    }
    let scale = scale_of(thread, sum, p.epsilon);
    for (var first = 0u; first < fours; first += THREADS) {
        let i = first + thread;
        let within = i < fours;
        var x = vec4<f32>();
        if within {
            // What this thread itself has written.
            x = (four(source + i) - mean) * scale;
            if p.weight != NONE {
                x *= weights(p.weight + 4u * i);
            }
            if p.to != NONE {
                arena[p.to / 4u + start + i] = bitcast<vec4<u32>>(x);
            }
        }
        if p.bytes != NONE {
            quantize_four(thread, x, start + i, within);
        }
    }
}
