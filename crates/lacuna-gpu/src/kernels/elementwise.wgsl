// What is done to each element by itself, a thread for each.

struct Params {
    to: u32,         // word of the first element that is changed
    source: u32,     // word of the first of the other operand, where there is one
    count: u32,
    operation: u32,
    function: u32,   // which activation
    factor: f32,     // or cap
    alpha: f32,      // of a gate that is clamped
    limit: f32,
    width: u32,      // elements of a row
    first: u32,      // columns that are meant
    end: u32,
    vector: u32,     // where what columns have begins in `vectors`
    factors: u32,    // word of the first row's factor
    stride: u32,     // words from one to the next
    least: f32,      // what results are held between
    most: f32,
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<f32>;
@group(0) @binding(1) var<storage, read> vectors: array<f32>;

const ADD = 0u;        // to += factor * from
const SCALE = 1u;      // to *= factor
const SOFT_CAP = 2u;   // to = factor * tanh(to / factor)
const GATE = 3u;       // to = f(to) * from
const APPLY = 4u;      // to = f(to)
const MULTIPLY = 5u;   // to *= from
const SCALE_COLUMNS = 6u;    // to *= what its column has
const SCALE_PART = 7u;       // to *= factor in some columns
const ADD_SCALED_ROWS = 8u;  // to += from * what its row has
const SCALE_ROWS = 9u;       // to *= what its row has
const TIME_STEPS = 10u;      // to = ln(1 + e^(to + what its column has)), between limits
const DECAY = 11u;           // to = e^(from * what its column has)

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
            y = gated(x, arena[p.source + number]);
        }
        case MULTIPLY: {
            y = x * arena[p.source + number];
        }
        case SCALE_COLUMNS: {
            y = x * vectors[p.vector + number % p.width];
        }
        case SCALE_PART: {
            let column = number % p.width;
            if column >= p.first && column < p.end {
                y = x * p.factor;
            }
        }
        case ADD_SCALED_ROWS: {
            y = fma(arena[p.factors + number / p.width * p.stride], arena[p.source + number], x);
        }
        case SCALE_ROWS: {
            y = x * arena[p.factors + number / p.width * p.stride];
        }
        case TIME_STEPS: {
            y = clamp(softplus(x + vectors[p.vector + number % p.width]), p.least, p.most);
        }
        case DECAY: {
            y = exp(arena[p.source + number] * vectors[p.vector + number % p.width]);
        }
        default: {
            y = activate(x);
        }
    }
    arena[p.to + number] = y;
}
