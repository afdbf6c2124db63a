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
@group(0) @binding(1) var<storage, read> vectors: array<vec4<f32>>;

const THREADS = 256u;
const NONE = 0xffffffffu;
// Vectors of a short row that a thread has at most.
const HELD = 4u;

struct Held {
    a: vec4<f32>,
    b: vec4<f32>,
    c: vec4<f32>,
    d: vec4<f32>,
}

fn put(word: u32, value: u32) {
    arena[word / 4u][word % 4u] = value;
}

fn four(at: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(arena[at]);
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

// A vector of a short row as far as there is one; zeros, which change no sum of squares, else.
fn held(at: u32, i: u32, fours: u32) -> vec4<f32> {
    if i >= fours {
        return vec4<f32>();
    }
    return four(at + i);
}

fn all_held(at: u32, thread: u32, fours: u32) -> Held {
    return Held(
        held(at, thread, fours),
        held(at, thread + THREADS, fours),
        held(at, thread + 2u * THREADS, fours),
        held(at, thread + 3u * THREADS, fours),
    );
}

fn weight_of(i: u32, fours: u32) -> vec4<f32> {
    if p.weight == NONE || i >= fours {
        return vec4<f32>(1.0);
    }
    return vectors[p.weight / 4u + i];
}

// Writes a vector of a row and its bytes, as far as these are asked for. All threads come here together.
fn leave(thread: u32, i: u32, fours: u32, start: u32, x: vec4<f32>) {
    if p.to != NONE && i < fours {
        arena[p.to / 4u + start + i] = bitcast<vec4<u32>>(x);
    }
    if p.bytes != NONE {
        quantize_four(thread, x, start + i, i < fours);
    }
}

// What is done to a row that threads can keep, and to which at most rows without a norm are added: everything is read
// before anything is written, so that it is waited for once.
fn prepare_short(thread: u32, start: u32) {
    let fours = p.width / 4u;
    let source = p.source / 4u + start;
    var x = all_held(source, thread, fours);
    let weights = Held(
        weight_of(thread, fours),
        weight_of(thread + THREADS, fours),
        weight_of(thread + 2u * THREADS, fours),
        weight_of(thread + 3u * THREADS, fours),
    );
    if p.add != NONE {
        let more = all_held(p.add / 4u + start, thread, fours);
        let factor = vec4<f32>(p.factor);
        x = Held(
            fma(factor, more.a, x.a),
            fma(factor, more.b, x.b),
            fma(factor, more.c, x.c),
            fma(factor, more.d, x.d),
        );
        if thread < fours {
            arena[source + thread] = bitcast<vec4<u32>>(x.a);
        }
        if thread + THREADS < fours {
            arena[source + thread + THREADS] = bitcast<vec4<u32>>(x.b);
        }
        if thread + 2u * THREADS < fours {
            arena[source + thread + 2u * THREADS] = bitcast<vec4<u32>>(x.c);
        }
        if thread + 3u * THREADS < fours {
            arena[source + thread + 3u * THREADS] = bitcast<vec4<u32>>(x.d);
        }
    }
    let sum = squares(squares(squares(squares(0.0, x.a), x.b), x.c), x.d);
    let scale = scale_of(thread, sum, p.epsilon);
    leave(thread, thread, fours, start, x.a * scale * weights.a);
    if fours > THREADS {
        leave(thread, thread + THREADS, fours, start, x.b * scale * weights.b);
    }
    if fours > 2u * THREADS {
        leave(thread, thread + 2u * THREADS, fours, start, x.c * scale * weights.c);
    }
    if fours > 3u * THREADS {
        leave(thread, thread + 3u * THREADS, fours, start, x.d * scale * weights.d);
    }
}

@compute @workgroup_size(THREADS)
fn prepare(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let fours = p.width / 4u;
    let start = group.x * fours;
    if fours <= HELD * THREADS && p.inner == NONE && p.centered == 0u {
        prepare_short(thread, start);
        return;
    }
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
                more = (more - inner_mean) * inner * vectors[p.inner / 4u + i];
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
        var x = vec4<f32>();
        if i < fours {
            // What this thread itself has written.
            x = (four(source + i) - mean) * scale * weight_of(i, fours);
        }
        leave(thread, i, fours, start, x);
    }
}
