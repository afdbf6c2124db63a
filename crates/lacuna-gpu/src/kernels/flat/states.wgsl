// Elements of a state, by their numbers from where the window begins.

@group(0) @binding(2) var<storage, read_write> states: array<f32>;

fn state_at(at: u32) -> f32 {
    return states[at];
}

fn keep_state(at: u32, element: f32) {
    states[at] = element;
}
