// A row: nibbles, then `d: f16` of each 32; weight `d * level`.
const LESS = 0;
const HALVES_DIFFER = false;
const HAS_MINIMUM = false;

fn load(row: u32, number: u32) -> Unit {
    return unit_of(weights[row + number], half_float(16u * (row + p.units) + number * 2u));
}
