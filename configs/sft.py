from configs import default


def get_config():
    config = default.get_config()
    return config
