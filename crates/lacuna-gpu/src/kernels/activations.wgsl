// What a gate makes of an element: `p.function` says which.

const SILU = 0u;
const GELU_TANH = 1u;
const RELU = 2u;
const RELU_SQUARED = 3u;
const SIGMOID = 4u;

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
