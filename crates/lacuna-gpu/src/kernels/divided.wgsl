// The quotient that is nearest, as the processor has it: a device's own may be off by some last places, which is enough to round
// what lies in the middle between two bytes the other way. Weights of few bits have many such.
fn divided(a: f32, b: f32) -> f32 {
    let near = a / b;
    return fma(fma(-near, b, a), 1.0 / b, near);
}
