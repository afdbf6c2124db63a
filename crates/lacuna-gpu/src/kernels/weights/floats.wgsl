// Floats: a unit is 32 bytes of them. `load` of the type says what they are, in fours. Columns beyond the last are zero
// in both. Added one after the other, each by an `fma`.

// Columns of a token.
struct Input {
    fours: Fours,
}

fn four(token: u32, column: u32) -> vec4<f32> {
    let at = p.input + token * p.columns + column;
    var found = vec4<f32>();
    if column < p.columns {
        found.x = bitcast<f32>(arena[at]);
    }
    if column + 1u < p.columns {
        found.y = bitcast<f32>(arena[at + 1u]);
    }
    if column + 2u < p.columns {
        found.z = bitcast<f32>(arena[at + 2u]);
    }
    if column + 3u < p.columns {
        found.w = bitcast<f32>(arena[at + 3u]);
    }
    return found;
}

fn add_four(sum: f32, a: vec4<f32>, b: vec4<f32>) -> f32 {
    return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, sum))));
}
