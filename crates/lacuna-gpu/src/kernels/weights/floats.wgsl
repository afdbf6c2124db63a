// Floats: a unit is four columns, the last perhaps fewer. `elements` of the type says what they are.

struct Unit {
    weights: vec4<f32>,
}

fn load(start: u32, number: u32) -> Unit {
    return Unit(elements(start, number * 4u, min(p.columns - number * 4u, 4u)));
}

fn share(unit: Unit, number: u32, token: u32) -> f32 {
    let at = p.input + token * p.columns + number * 4u;
    let left = p.columns - number * 4u;
    var sum = unit.weights.x * bitcast<f32>(arena[at]);
    if left > 1u {
        sum += unit.weights.y * bitcast<f32>(arena[at + 1u]);
    }
    if left > 2u {
        sum += unit.weights.z * bitcast<f32>(arena[at + 2u]);
    }
    if left > 3u {
        sum += unit.weights.w * bitcast<f32>(arena[at + 3u]);
    }
    return sum;
}
