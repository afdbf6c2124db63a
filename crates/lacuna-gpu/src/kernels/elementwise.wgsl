// What is done to each element by itself, a thread for each.

struct Params {
    to: u32,         // word of the first element that is changed
    source: u32,       // word of the first of the other operand, where there is one
    count: u32,
    operation: u32,
    function: u32,   // which activation
    factor: f32,     // or cap
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<f32>;

const ADD = 0u;       // to += factor * from
const SCALE = 1u;     // to *= factor
const SOFT_CAP = 2u;  // to = factor * tanh(to / factor)
const GATE = 3u;      // to = f(to) * from
const APPLY = 4u;     // to = f(to)

// By an exponential that does not overflow.
fn hyperbolic_tangent(x: f32) -> f32 {
    let power = exp(-2.0 * abs(x));
    return sign(x) * ((1.0 - power) / (1.0 + power));
}

@compute @workgroup_size(128)
fn elementwise(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let number = (group.y * groups.x + group.x) * 128u + thread;
    if number >= p.count {
        return;
    }
    let x = arena[p.to + number];
    var y = x;
    switch p.operation {
        case ADD: {
            y = x + p.factor * arena[p.source + number];
        }
        case SCALE: {
            y = x * p.factor;
        }
        case SOFT_CAP: {
            y = p.factor * hyperbolic_tangent(x / p.factor);
        }
        case GATE: {
            y = activate(x) * arena[p.source + number];
        }
        default: {
            y = activate(x);
        }
    }
    arena[p.to + number] = y;
}
