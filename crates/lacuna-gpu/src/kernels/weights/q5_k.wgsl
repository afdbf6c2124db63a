// A row: as Q4_K, then a word of fifth bits of each 32.
const LESS = 0;
const HALVES_DIFFER = false;
const HAS_MINIMUM = true;

fn load(row: u32, number: u32) -> Unit {
    let packed = weights[row + number];
    let nested = nested_scales(weights[row + p.units + number / 8u], number % 8u);
    let bits = words[4u * (row + p.units + p.units / 8u) + number];
    let low = (packed & NIBBLES) | fifth_bits(bits, 0u);
    let high = ((packed >> vec4<u32>(4u)) & NIBBLES) | fifth_bits(bits, 4u);
    return Unit(low, high, vec2<f32>(nested.x), nested.y);
}
