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

const SILU = 0u;
const GELU_TANH = 1u;
const RELU = 2u;
const RELU_SQUARED = 3u;
const SIGMOID = 4u;

// By an exponential that does not overflow.
fn hyperbolic_tangent(x: f32) -> f32 {
    let power = exp(-2.0 * abs(x));
    return sign(x) * ((1.0 - power) / (1.0 + power));
}

fn activate(x: f32) -> f32 {
    switch p.function {
        case SILU: {
            // Limited, so that the exponential stays finite: the result is below 1e-36 there.
            let limited = max(x, -88.0);
            return limited / (1.0 + exp(-limited));
        }
        case GELU_TANH: {
            // (1 + tanh(u)) / 2 is 1 / (1 + e^-2u), which does not cancel where u is negative. Limited as above.
            let limited = max(x, -10.0);
            let u = 0.7978845608 * (limited + 0.044715 * limited * limited * limited);
            return limited / (1.0 + exp(-2.0 * min(u, 40.0)));
        }
        case RELU: {
            return max(x, 0.0);
        }
        case RELU_SQUARED: {
            let positive = max(x, 0.0);
            return positive * positive;
        }
        default: {
            return 1.0 / (1.0 + exp(-max(x, -88.0)));
        }
    }
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
