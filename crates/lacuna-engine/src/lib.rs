//! lacuna-engine
