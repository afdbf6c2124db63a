//! What is refused: images and projectors that are others, and encoders whose numbers no encoder has.

use std::fs;
use std::ops::Range;

use lacuna_files::{Mapping, ModelFiles};
use lacuna_models::spec::Grid;
use lacuna_models::{ConfigError, ForwardError, ImageEncoder, LogitRows, Model, Segment, Shown};
use serde_json::{Value, json};

use crate::runner::{Runner, folder};
use crate::support::{Eyes, FORMS, expected, read, rows_of_images, seeing};

fn forward(runner: &mut Runner, tokens: &[u32], images: &[Shown]) -> Result<(), ForwardError> {
    let mut sequence = runner.sequence();
    sequence.prepare(tokens.len()).expect("room");
    let segment = Segment {
        tokens,
        sequence: &mut sequence,
        logits: LogitRows::Last,
        images,
    };
    let (model, scratch) = (&runner.model, &mut runner.scratch);
    model
        .forward(&runner.cpu, &mut [segment], scratch)
        .map(drop)
}

#[test]
fn what_is_no_image_is_refused() {
    let mut eyes = Eyes::open("gemma3", "hf", 1);
    for (bytes, grid) in [
        (12, Grid::square(4)),
        (
            16 * 32 * 3,
            Grid {
                rows: 4,
                columns: 8,
            },
        ),
        (0, Grid::square(0)),
        (
            0,
            Grid {
                rows: usize::MAX,
                columns: 2,
            },
        ),
    ] {
        let refused = eyes.encode(&vec![0; bytes], grid);
        assert!(matches!(
            refused,
            Err(ForwardError::ImageSize { bytes: found, .. }) if found == bytes
        ));
    }
    let mut runner = seeing("gemma3", FORMS[0]);
    let shown = |positions: Range<usize>, elements: usize| Shown {
        grid: Grid::row(positions.len()),
        positions,
        rows: vec![0.5; elements].into(),
    };
    let tokens = [9, u32::MAX, u32::MAX, 9];
    forward(&mut runner, &tokens, &[shown(1..3, 32), shown(7..9, 32)]).expect("it fits");
    for images in [
        vec![shown(1..3, 31)],
        vec![shown(2..2, 0)],
        vec![shown(2..5, 48)],
        vec![shown(1..3, 32), shown(2..4, 32)],
    ] {
        let refused = forward(&mut runner, &tokens, &images);
        assert!(matches!(refused, Err(ForwardError::MisplacedImage { .. })));
    }
    // Tokens beside them are tokens.
    let refused = forward(&mut runner, &tokens, &[shown(1..2, 16)]);
    assert!(matches!(refused, Err(ForwardError::TokenOutOfRange { .. })));
    let mut blind = Runner::open("qwen3/hf");
    let refused = forward(&mut blind, &tokens, &[shown(1..3, 64)]);
    assert!(matches!(refused, Err(ForwardError::NoImages)));
}

#[test]
fn a_projector_of_another_model_is_told_from_the_right_one() {
    let eyes = Eyes::open("gemma3", "mmproj.gguf", 1);
    let model = |path: &str| {
        let files = ModelFiles::open(&folder().join(path)).expect("the fixture opens");
        Model::load(files).expect("the fixture loads")
    };
    let check = |path: &str| eyes.encoder.check_decoder(model(path).spec());
    check("vision/gemma3/model.gguf").expect("its own");
    let wrong = check("families/gemma3/hf");
    assert!(matches!(
        wrong,
        Err(ConfigError::Projector {
            width: 16,
            hidden: 8
        })
    ));
    let blind = check("qwen3/hf").expect_err("it does not see").to_string();
    assert!(blind.contains("qwen3"), "{blind}");
    // A model of language alone has no eyes, and is no projector.
    for path in ["vision/gemma3/model.gguf", "qwen3/hf", "families/gemma3/hf"] {
        let files = ModelFiles::open(&folder().join(path)).expect("the fixture opens");
        let none = ImageEncoder::load(files).expect("it loads");
        assert!(none.is_none(), "{path}");
    }
}

/// The projector's file with another number behind a key.
fn with_number(model: &str, key: &str, number: u32) -> ModelFiles {
    let mut file = read(&format!("vision/{model}/mmproj.gguf"));
    let at = file.windows(key.len()).position(|it| it == key.as_bytes());
    // Behind the name, the type of the number.
    let at = at.expect("the key") + key.len() + 4;
    file[at..at + 4].copy_from_slice(&number.to_le_bytes());
    ModelFiles::from_gguf(Mapping::from(file)).expect("a GGUF file")
}

#[test]
fn numbers_of_encoders_that_are_out_of_range_are_typed_errors() {
    // With whether some are of other encoders that could be: of other sizes, windows and heads.
    for (model, key, possible) in [
        ("qwen3-vl", "patch_size", false),
        ("qwen3-vl", "image_size", false),
        ("qwen3-vl", "embedding_length", false),
        ("qwen3-vl", "block_count", false),
        ("qwen3-vl", "attention.head_count", true),
        ("qwen3-vl", "projection_dim", false),
        ("qwen3-vl", "spatial_merge_size", false),
        ("qwen2.5-vl", "n_wa_pattern", true),
        ("qwen2.5-vl", "window_size", true),
        ("qwen2-vl", "embedding_length", false),
        ("gemma4", "patch_size", false),
        ("gemma4", "embedding_length", false),
        ("gemma4", "feed_forward_length", false),
        ("gemma4", "block_count", false),
        ("gemma4", "attention.head_count", false),
        ("gemma4", "projection_dim", false),
        ("mistral3", "patch_size", false),
        ("mistral3", "image_size", true),
        ("mistral3", "embedding_length", false),
        ("mistral3", "block_count", false),
        ("mistral3", "attention.head_count", true),
        ("mistral3", "projection_dim", false),
        ("mistral3", "spatial_merge_size", false),
    ] {
        for number in [0, 1, 3, 5000, i32::MAX as u32, u32::MAX] {
            let files = with_number(model, &format!("clip.vision.{key}"), number);
            match ImageEncoder::load(files) {
                Ok(_) => assert!(number > 0 && possible, "{model}, {key}: {number}"),
                Err(error) => assert!(!error.to_string().is_empty()),
            }
        }
    }
}

#[test]
fn pixels_beyond_bounds_are_held_to_what_is_planned_for() {
    for (key, number) in [
        ("clip.vision.image_max_pixels", u32::MAX),
        ("clip.vision.image_max_pixels", 0),
        ("clip.vision.image_min_pixels", u32::MAX),
    ] {
        let Ok(Some(encoder)) = ImageEncoder::load(with_number("qwen3-vl", key, number)) else {
            continue;
        };
        let shape = *encoder.shape();
        assert!(
            shape.most_tokens() <= 1280,
            "{key}: {}",
            shape.most_tokens()
        );
        for size in [[4000, 3000], [8, 8], [1, 200]] {
            let grid = shape.grid(shape.fit(size).expect("of a shape that is taken"));
            assert!(grid.count() <= shape.most().tokens, "{key}: {grid:?}");
        }
    }
}

/// What is said of a folder whose file `name` has `value` at the place that `path` names, nothing there where it is null; or
/// the rows of its first picture.
fn changed(model: &str, name: &str, path: &[&str], value: Value) -> Result<Vec<f32>, String> {
    let scratch = tempfile::tempdir().expect("a folder");
    let hf = folder().join(format!("vision/{model}/hf"));
    for entry in fs::read_dir(&hf).expect("a committed fixture") {
        let entry = entry.expect("readable");
        fs::copy(entry.path(), scratch.path().join(entry.file_name())).expect("room");
    }
    let file = scratch.path().join(name);
    let text = fs::read(&file).expect("it is there");
    let mut whole: Value = serde_json::from_slice(&text).expect("valid JSON");
    let (last, outer) = path.split_last().expect("a name");
    let place = outer
        .iter()
        .fold(&mut whole, |place, name| &mut place[*name]);
    let place = place.as_object_mut().expect("an object");
    assert!(place.remove(*last).is_some(), "{path:?}");
    if !value.is_null() {
        place.insert((*last).to_owned(), value);
    }
    fs::write(&file, whole.to_string()).expect("room");
    let files = ModelFiles::open(scratch.path()).map_err(|error| error.to_string())?;
    let loaded = ImageEncoder::load(files).map_err(|error| error.to_string())?;
    let mut eyes = Eyes::of(loaded.ok_or("no encoder")?, 1);
    let image = expected(model).images[0];
    let pixels = read(&format!("vision/{model}/images.u8"));
    let grid = eyes.encoder.shape().grid(image.size);
    let rows = eyes.encode(&pixels[..image.bytes()], grid);
    rows.map_err(|error| error.to_string())
}

#[test]
fn smolvlm_is_idefics_3_by_another_name() {
    let class = json!(["SmolVLMForConditionalGeneration"]);
    let rows = changed("idefics3", "config.json", &["architectures"], class).expect("it loads");
    let all = rows_of_images("idefics3", "hf", 1);
    assert_eq!(rows, all[0][..rows.len()]);
}

#[test]
fn numbers_that_no_encoder_of_tiles_has_are_refused() {
    let [config, pixels] = ["config.json", "preprocessor_config.json"];
    for (file, path, value, says) in [
        (config, &["vision_config", "image_size"][..], json!(0), ""),
        (
            config,
            &["vision_config", "patch_size"],
            json!(0),
            "pixels of a patch",
        ),
        (
            config,
            &["vision_config", "patch_size"],
            json!(-1),
            "patch_size",
        ),
        (
            config,
            &["vision_config", "patch_size"],
            json!(3),
            "squares of 2",
        ),
        (
            config,
            &["vision_config", "num_attention_heads"],
            json!(5),
            "heads",
        ),
        (
            config,
            &["vision_config", "num_hidden_layers"],
            json!(9_000_000),
            "layers",
        ),
        (
            config,
            &["vision_config", "hidden_size"],
            json!(3 << 28),
            "hidden",
        ),
        (
            config,
            &["vision_config", "model_type"],
            json!("clip"),
            "clip",
        ),
        (
            config,
            &["vision_config", "hidden_act"],
            json!("relu"),
            "relu",
        ),
        (config, &["scale_factor"], json!(0), "merged patches"),
        (config, &["scale_factor"], json!(3), "squares of 3"),
        (
            config,
            &["scale_factor"],
            json!(1_000_000),
            "merged patches",
        ),
        (pixels, &["size", "longest_edge"], json!(0), "longer side"),
        (pixels, &["size", "longest_edge"], json!(-7), "longest_edge"),
        (
            pixels,
            &["size", "longest_edge"],
            json!(1 << 30),
            "longer side",
        ),
        (
            pixels,
            &["size", "longest_edge"],
            json!(4000),
            "tiles of a side",
        ),
        (
            pixels,
            &["max_image_size", "longest_edge"],
            json!(32),
            "tiles of 32",
        ),
        (pixels, &["resample"], json!(0), "filter 0"),
        (pixels, &["image_std"], json!([0.5, 0.0, 0.5]), "deviation"),
    ] {
        let refused = changed("idefics3", file, path, value.clone()).expect_err(says);
        assert!(refused.contains(says), "{path:?} {value}: {refused}");
    }
}

#[test]
fn what_no_encoder_of_qwen_computes_is_refused() {
    for (model, name, value, says) in [
        ("qwen2-vl", "hidden_act", json!("silu"), "silu"),
        ("qwen2-vl", "mlp_ratio", json!(0), "feed_forward"),
        ("qwen2-vl", "num_heads", json!(0), "heads"),
        ("qwen3-vl", "temporal_patch_size", json!(1), "two frames"),
        ("qwen3-vl", "in_channels", json!(1), "three channels"),
        (
            "qwen3-vl",
            "spatial_merge_size",
            json!(0),
            "square of patches",
        ),
        (
            "qwen3-vl",
            "deepstack_visual_indexes",
            json!([0, 1, 2, 3, 4, 5, 6, 7, 8]),
            "parts of images' rows",
        ),
        ("qwen3-vl", "deepstack_visual_indexes", json!([4]), "layer"),
        // The second part would be whatever memory had.
        (
            "qwen3-vl",
            "deepstack_visual_indexes",
            json!([2, 2]),
            "layer 2 as two parts",
        ),
        (
            "qwen2.5-vl",
            "fullatt_block_indexes",
            json!([1]),
            "4 layers of which [1]",
        ),
        (
            "qwen2.5-vl",
            "fullatt_block_indexes",
            json!([0, 3]),
            "4 layers of which [0, 3]",
        ),
    ] {
        let path = ["vision_config", name];
        let refused = changed(model, "config.json", &path, value.clone()).expect_err(says);
        assert!(refused.contains(says), "{name} {value}: {refused}");
    }
    // No layer that sees all of an image is one rule too.
    let path = ["vision_config", "fullatt_block_indexes"];
    changed("qwen2.5-vl", "config.json", &path, json!([])).expect("windows alone");
}

#[test]
fn folders_with_other_encoders_and_rows_of_other_layers_are_refused() {
    for (path, value, says) in [
        (
            &["vision_config", "model_type"][..],
            json!("clip_vision_model"),
            "clip_vision_model",
        ),
        (&["vision_feature_layer"], json!(-2), "layer -2"),
        (&["vision_feature_layer"], Value::Null, "layer -2"),
        (
            &["vision_feature_select_strategy"],
            json!("default"),
            "default",
        ),
        (&["projector_hidden_act"], json!("relu"), "relu"),
    ] {
        let refused = changed("pixtral", "config.json", path, value.clone()).expect_err(says);
        assert!(refused.contains(says), "{path:?} {value}: {refused}");
    }
}

#[test]
fn what_no_encoder_between_bounds_computes_is_refused() {
    let [config, pixels] = ["config.json", "processor_config.json"];
    for (model, file, path, value, says) in [
        (
            "gemma4",
            config,
            &["vision_config", "hidden_activation"][..],
            json!("relu"),
            "relu",
        ),
        (
            "gemma4",
            config,
            &["vision_config", "model_type"],
            json!("gemma4_unified_vision"),
            "gemma4_unified_vision",
        ),
        (
            "gemma4",
            config,
            &["vision_config", "num_key_value_heads"],
            json!(1),
            "num_key_value_heads",
        ),
        (
            "gemma4",
            config,
            &["vision_config", "pooling_kernel_size"],
            json!(0),
            "patches of a side",
        ),
        (
            "gemma4",
            config,
            &["vision_config", "patch_size"],
            json!(0),
            "pixels of a patch",
        ),
        (
            "gemma4",
            config,
            &["vision_config", "head_dim"],
            json!(6),
            "6",
        ),
        // Its places would be those of nothing.
        (
            "gemma4",
            config,
            &["vision_config", "position_embedding_size"],
            json!(839),
            "longer side",
        ),
        // What is between bounds in files is not computed without them, and the other way round.
        (
            "gemma4",
            config,
            &["vision_config", "use_clipped_linears"],
            json!(false),
            "input_m",
        ),
        (
            "gemma4-dense",
            config,
            &["vision_config", "use_clipped_linears"],
            json!(true),
            "input_m",
        ),
        (
            "gemma4-dense",
            config,
            &["vision_config", "standardize"],
            json!(false),
            "std_",
        ),
        (
            "gemma4",
            pixels,
            &["image_processor", "max_soft_tokens"],
            json!(-1),
            "max_soft_tokens",
        ),
        (
            "gemma4",
            pixels,
            &["image_processor", "max_soft_tokens"],
            json!(281),
            "longer side",
        ),
        (
            "gemma4",
            pixels,
            &["image_processor", "max_soft_tokens"],
            json!(u64::MAX),
            "pixels of an image",
        ),
    ] {
        let refused = changed(model, file, path, value.clone()).expect_err(says);
        assert!(refused.contains(says), "{path:?} {value}: {refused}");
    }
    let path = ["image_processor", "max_soft_tokens"];
    let rows = changed("gemma4", pixels, &path, json!(70)).expect("fewer tokens");
    let all = rows_of_images("gemma4", "hf", 1);
    assert_eq!(rows, all[0]);
}
