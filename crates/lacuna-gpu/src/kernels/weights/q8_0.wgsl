// A row: bytes, then `d: f16` of each 32; weight `d * q`.
const LESS = 0;
const HALVES_DIFFER = false;
const HAS_MINIMUM = false;

fn load(row: u32, number: u32) -> Unit {
    let at = row + number * 2u;
    let scale = half_float(16u * (row + p.units * 2u) + number * 2u);
    return Unit(weights[at], weights[at + 1u], vec2<f32>(scale), 0.0);
}
