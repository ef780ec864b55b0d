"""What tests share: servers, processes, models, views."""
