// A causal convolution of each channel by itself, which goes on from a sequence's state: a thread for each channel, over
// the tokens of a segment one after the other, so a prompt may be cut anywhere.

struct Params {
    values: u32,    // word of the segment's first token
    tokens: u32,
    channels: u32,
    taps: u32,      // tokens that one depends on, up to 4
    weights: u32,   // where the first tap's begin in `vectors`
    bias: u32,      // and what is added, or NONE
    function: u32,  // what sums go through, or NONE
    state: u32,     // word of the state in the window
    fresh: u32,     // 1: before the first token all states are zero, whatever is there
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<f32>;
@group(0) @binding(1) var<storage, read> vectors: array<f32>;

const THREADS = 128u;
const NONE = 0xffffffffu;
const PANEL = 16u;

@compute @workgroup_size(THREADS)
fn convolve(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let channel = group.x * THREADS + thread;
    if channel >= p.channels {
        return;
    }
    // Panels of 16 channels: the inputs of the last `taps - 1` tokens, the oldest first.
    let state = p.state + channel / PANEL * (p.taps - 1u) * PANEL + channel % PANEL;
    // Of fewer taps than four, the first have no weight, and see nothing.
    let without = 4u - p.taps;
    var weights = vec4<f32>();
    var past = vec4<f32>();
    for (var tap = 0u; tap < p.taps; tap++) {
        weights[without + tap] = vectors[p.weights + tap * p.channels + channel];
        if tap + 1u < p.taps && p.fresh == 0u {
            past[without + tap] = state_at(state + tap * PANEL);
        }
    }
    var bias = 0.0;
    if p.bias != NONE {
        bias = vectors[p.bias + channel];
    }
    var at = p.values + channel;
    var next = arena[at];
    for (var token = 0u; token < p.tokens; token++) {
        past.w = next;
        if token + 1u < p.tokens {
            // Before this one is written, so that it is under way meanwhile.
            next = arena[at + p.channels];
        }
        var sum = fma(weights.x, past.x, bias);
        sum = fma(weights.y, past.y, sum);
        sum = fma(weights.z, past.z, sum);
        sum = fma(weights.w, past.w, sum);
        if p.function != NONE {
            sum = activate(sum);
        }
        arena[at] = sum;
        at += p.channels;
        past = vec4<f32>(past.yzw, 0.0);
    }
    for (var tap = 0u; tap + 1u < p.taps; tap++) {
        keep_state(state + tap * PANEL, past[without + tap]);
    }
}
