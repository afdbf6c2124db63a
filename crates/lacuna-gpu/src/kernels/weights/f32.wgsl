// IEEE 754 binary32: eight to a unit.
struct Fours {
    a: vec4<f32>,
    b: vec4<f32>,
}

struct Unit {
    fours: Fours,
}

fn load(row: u32, number: u32) -> Unit {
    let first = weights[row + number * 2u];
    let second = weights[row + number * 2u + 1u];
    return Unit(Fours(bitcast<vec4<f32>>(first), bitcast<vec4<f32>>(second)));
}

fn input_of(token: u32, number: u32) -> Input {
    let column = number * 8u;
    return Input(Fours(four(token, column), four(token, column + 4u)));
}

fn add(sum: f32, unit: Unit, input: Input) -> f32 {
    return add_four(add_four(sum, unit.fours.a, input.fours.a), unit.fours.b, input.fours.b);
}

const FOURS = 2u;

// Four weights of a unit.
fn load_four(row: u32, number: u32, part: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(weights[row + number * 2u + part]);
}
