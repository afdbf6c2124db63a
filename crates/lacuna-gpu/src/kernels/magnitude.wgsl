// What is done to a row by numbers of all of it: a workgroup for each row. Sums are made as in `norm`.

struct Params {
    to: u32,         // word of the first row that is changed
    like: u32,       // word of the first of the other rows, or NONE
    width: u32,
    least: f32,      // what a mean square is at least
    deviations: f32,
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<f32>;

const THREADS = 128u;
const NONE = 0xffffffffu;

// The mean square of what a row's elements differ from a number by.
fn mean_square(thread: u32, row: u32, middle: f32) -> f32 {
    var sum = 0.0;
    for (var i = thread; i < p.width; i += THREADS) {
        let x = arena[row + i] - middle;
        sum += x * x;
    }
    return together(thread, sum) / f32(p.width);
}

@compute @workgroup_size(THREADS)
fn magnitude(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let row = p.to + group.x * p.width;
    if p.like != NONE {
        // The row gets the root mean square of the other.
        let wanted = sqrt(mean_square(thread, p.like + group.x * p.width, 0.0));
        let factor = wanted / sqrt(max(mean_square(thread, row, 0.0), p.least));
        for (var i = thread; i < p.width; i += THREADS) {
            arena[row + i] *= factor;
        }
        return;
    }
    // What exceeds the mean by so many standard deviations is left, less as much.
    var sum = 0.0;
    for (var i = thread; i < p.width; i += THREADS) {
        sum += arena[row + i];
    }
    let mean = together(thread, sum) / f32(p.width);
    let cutoff = mean + p.deviations * sqrt(mean_square(thread, row, mean));
    for (var i = thread; i < p.width; i += THREADS) {
        arena[row + i] = max(arena[row + i] - cutoff, 0.0);
    }
}
