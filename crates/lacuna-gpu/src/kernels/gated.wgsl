// What a gate lets through, for kernels that have `p.alpha` and `p.limit` and what `activations.wgsl` needs.

// Of a gate and what it gates alone: both are limited.
const CLAMPED = 8u;

fn gated(gate: f32, up: f32) -> f32 {
    if p.function == CLAMPED {
        let g = min(gate, p.limit);
        return g * sigmoid(p.alpha * g) * (clamp(up, -p.limit, p.limit) + 1.0);
    }
    return activate(gate) * up;
}
