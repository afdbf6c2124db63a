//! lacuna-models
