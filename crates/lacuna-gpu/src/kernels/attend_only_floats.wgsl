// Where both keys and values are floats.

fn make_ready(thread: u32) {}

fn score(row: u32, head: u32) -> f32 {
    return score_of_floats(row, head);
}

fn value(row: u32, head: u32, i: u32) -> f32 {
    return value_of_floats(row, head, i);
}
