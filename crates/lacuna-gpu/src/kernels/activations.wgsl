// What a gate makes of an element: `p.function` says which.

const SILU = 0u;
const GELU_TANH = 1u;
const RELU = 2u;
const RELU_SQUARED = 3u;
const SIGMOID = 4u;
const GELU_ERF = 5u;
const TANH = 6u;
const SOFTPLUS = 7u;

fn sigmoid(x: f32) -> f32 {
    // Limited, so that the exponential stays finite.
    return 1.0 / (1.0 + exp(-max(x, -88.0)));
}

// By an exponential that does not overflow.
fn hyperbolic_tangent(x: f32) -> f32 {
    let power = exp(-2.0 * abs(x));
    return sign(x) * ((1.0 - power) / (1.0 + power));
}

// With a = |x| and the share of the normal distribution above a, q: max(x, 0) - a q, which does not cancel. q is
// e^(-a^2 / 2) g(a), and of (a + 4) g(a) this is an interpolation in (a - 4) / (a + 4), the processor's.
fn gelu(x: f32) -> f32 {
    let a = min(abs(x), 14.0);
    let reciprocal = 1.0 / (a + 4.0);
    let place = 1.0 - 8.0 * reciprocal;
    var sum = -1.201844e-4;
    sum = fma(sum, place, 2.0126173e-4);
    sum = fma(sum, place, 1.5723179e-3);
    sum = fma(sum, place, -3.5261838e-3);
    sum = fma(sum, place, -7.529251e-3);
    sum = fma(sum, place, 6.040669e-2);
    sum = fma(sum, place, -1.8652268e-1);
    sum = fma(sum, place, 3.871367e-1);
    sum = fma(sum, place, -6.078966e-1);
    sum = fma(sum, place, 7.5528514e-1);
    return max(x, 0.0) - a * (sum * reciprocal * exp(-0.5 * a * a));
}

// max(x, 0) + ln(1 + u) with u = e^-|x|, where ln(1 + u) is 2 atanh(s) with s = u / (2 + u), at most a third: a logarithm
// of numbers near 1 would lose what they differ by.
fn softplus(x: f32) -> f32 {
    let power = exp(max(-abs(x), -87.0));
    let small = power / (power + 2.0);
    let square = small * small;
    var sum = 1.0 / 17.0;
    sum = fma(sum, square, 1.0 / 15.0);
    sum = fma(sum, square, 1.0 / 13.0);
    sum = fma(sum, square, 1.0 / 11.0);
    sum = fma(sum, square, 1.0 / 9.0);
    sum = fma(sum, square, 1.0 / 7.0);
    sum = fma(sum, square, 1.0 / 5.0);
    sum = fma(sum, square, 1.0 / 3.0);
    sum = fma(sum, square, 1.0);
    return max(x, 0.0) + 2.0 * small * sum;
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
        case GELU_ERF: {
            return gelu(x);
        }
        case TANH: {
            return hyperbolic_tangent(x);
        }
        case SOFTPLUS: {
            return softplus(x);
        }
        default: {
            return sigmoid(x);
        }
    }
}
