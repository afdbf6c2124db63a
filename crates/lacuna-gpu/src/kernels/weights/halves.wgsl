// Two bytes each: sixteen to a unit.
struct Fours {
    a: vec4<f32>,
    b: vec4<f32>,
    c: vec4<f32>,
    d: vec4<f32>,
}

struct Unit {
    fours: Fours,
}

fn load(row: u32, number: u32) -> Unit {
    let first = weights[row + number * 2u];
    let second = weights[row + number * 2u + 1u];
    return Unit(Fours(
        vec4<f32>(two_of(first.x), two_of(first.y)),
        vec4<f32>(two_of(first.z), two_of(first.w)),
        vec4<f32>(two_of(second.x), two_of(second.y)),
        vec4<f32>(two_of(second.z), two_of(second.w)),
    ));
}

fn input_of(token: u32, number: u32) -> Input {
    let column = number * 16u;
    return Input(Fours(
        four(token, column), four(token, column + 4u), four(token, column + 8u), four(token, column + 12u)
    ));
}

fn add(sum: f32, unit: Unit, input: Input) -> f32 {
    let first = add_four(add_four(sum, unit.fours.a, input.fours.a), unit.fours.b, input.fours.b);
    return add_four(add_four(first, unit.fours.c, input.fours.c), unit.fours.d, input.fours.d);
}

const FOURS = 4u;

// Four weights of a unit.
fn load_four(row: u32, number: u32, part: u32) -> vec4<f32> {
    let at = 4u * row + number * 8u + part * 2u;
    return vec4<f32>(two_of(words[at]), two_of(words[at + 1u]));
}
