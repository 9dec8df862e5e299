"""`sglang-k3 plan`: what a deployment takes of a device's memory, and an estimate of a step's time.

Bytes come from the code that allocates: tensor shapes from models/names.py and dspark_config.py, states from
hf_config.state_params, records from replay_records.bank_bytes. Times are a roofline: an estimate, no
measurement.
"""
